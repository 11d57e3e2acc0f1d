"""The base class of a strategy's variables, which are read as a tensor wherever one is expected (``tf.Variable``).

It stands below the replicas, whose collectives read a variable as its value in the calling replica. The values are in
``mirroring.variable``.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from lockstep._torch_compat import tree_map
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import UsageError

_WRITE = "write it with assign, assign_add or assign_sub"
_HANDLES = frozenset(["data", "grad", "grad_fn", "backward", "register_hook", "requires_grad_", "retain_grad"])
"""Attributes of a tensor that make sense for the object itself only, not for a copy of its value."""
_SAME_FOR_ALL = frozenset(
    [
        *("shape", "dtype", "device", "ndim", "size", "dim", "numel", "layout", "requires_grad", "is_leaf"),
        *("is_floating_point", "is_complex", "is_cuda", "is_sparse", "is_nested", "is_meta", "is_quantized"),
    ]
)
"""Attributes that are equal in all replicas."""


def _unary(operation: Callable[[Any], Any]) -> Callable[[TensorLike], Any]:
    return lambda self: operation(self.read_value())


def _binary(
    operation: Callable[[Any, Any], Any],
) -> tuple[Callable[[TensorLike, Any], Any], Callable[[TensorLike, Any], Any]]:
    return (
        lambda self, other: operation(self.read_value(), other),
        lambda self, other: operation(other, self.read_value()),
    )


class TensorLike(ABC):
    """Operators, conversions, and torch's functions and methods, all applied to ``read_value()``.

    Results are plain tensors. Whatever would write into the tensor is refused.
    """

    __array_priority__ = 1000  # NumPy's arrays leave "array * variable" to the variable, as they do for tensors

    @abstractmethod
    def read_value(self) -> torch.Tensor:
        """The value as a new tensor."""

    @property
    @abstractmethod
    def per_replica(self) -> PerReplica[torch.Tensor]:
        """Each local replica's value, as new tensors."""

    @property
    @abstractmethod
    def is_mirrored(self) -> bool:
        """Whether all replicas have the same value."""

    @property
    @abstractmethod
    def _one(self) -> torch.Tensor:
        """Any replica's value, for attributes that are equal in all of them."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        read: list[tuple[torch.Tensor, int]] = []

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, TensorLike):
                return leaf
            with torch.inference_mode(False):  # inference tensors count no writes
                tensor = leaf.read_value()
            read.append((tensor, tensor._version))
            return tensor

        positional, named = tree_map(value, (tuple(args), dict(kwargs or {})))
        result = func(*positional, **named)
        if any(tensor._version != version for tensor, version in read):
            raise UsageError(f"{getattr(func, '__name__', func)} writes into a variable, past its replicas; {_WRITE}")
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _SAME_FOR_ALL:
            return getattr(self._one, name)
        if name.endswith("_") or name in _HANDLES:
            raise UsageError(f"a variable has no {name!r} of its own, which would pass its replicas by; {_WRITE}")
        return getattr(self.read_value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            raise UsageError(f"{name!r} of a variable cannot be set, which would pass its replicas by; {_WRITE}")
        super().__setattr__(name, value)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise UsageError(f"a part of a variable cannot be set, which would pass its replicas by; {_WRITE}")

    def _in_place(self, other: Any) -> NoReturn:
        raise UsageError(f"an operator such as += does not write a variable; {_WRITE}")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _in_place
    __iand__ = __ior__ = __ixor__ = _in_place

    def numpy(self) -> Any:
        return self.read_value().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        return len(self._one)

    def __format__(self, format_spec: str) -> str:
        return format(self.read_value(), format_spec) if format_spec else str(self)

    def __round__(self, digits: int = 0) -> Any:
        return self.read_value().round(decimals=digits)

    # Comparisons are elementwise, as for tensors, so the hash is the object's own.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return self.read_value() == other

    def __ne__(self, other: object) -> Any:
        return self.read_value() != other

    __bool__, __float__, __int__, __complex__ = _unary(bool), _unary(float), _unary(int), _unary(complex)
    __index__, __iter__ = _unary(operator.index), _unary(iter)
    __getitem__, __contains__ = _binary(operator.getitem)[0], _binary(operator.contains)[0]
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __add__, __radd__ = _binary(operator.add)
    __sub__, __rsub__ = _binary(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul)
    __and__, __rand__ = _binary(operator.and_)
    __or__, __ror__ = _binary(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor)
    __lt__ = _binary(operator.lt)[0]
    __le__ = _binary(operator.le)[0]
    __gt__ = _binary(operator.gt)[0]
    __ge__ = _binary(operator.ge)[0]


def read_tensors(structure: Any) -> Any:
    """``structure`` with each variable replaced by its value in the calling replica."""
    return tree_map(lambda leaf: leaf.read_value() if isinstance(leaf, TensorLike) else leaf, structure)


def read_per_replica(structure: Any) -> Any:
    """``structure`` with each variable replaced by its values in all local replicas."""
    return tree_map(lambda leaf: leaf.per_replica if isinstance(leaf, TensorLike) else leaf, structure)


def read_for_reduction(structure: Any) -> Any:
    """The same, but the bare value of a variable that is equal in all replicas: a mean over them would round it."""

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, TensorLike):
            return leaf
        return leaf.read_value() if leaf.is_mirrored else leaf.per_replica

    return tree_map(value, structure)
