"""Values that differ by replica: ``PerReplica``, and ``TensorLike``, the base class of a strategy's variables.

``select`` takes one replica's view of a structure on the way in; ``merge`` joins the replicas' results on the way out.
Structures are those of ``torch.utils._pytree``: tuples, lists, dicts, named tuples. A PerReplica is a leaf. A variable
is read as a tensor, its value in the calling replica, wherever one is expected (``tf.Variable``).
"""

from __future__ import annotations

import operator
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import torch

from lockstep._torch_compat import tree_flatten, tree_map, tree_unflatten
from lockstep.errors import ConfigError, UsageError

T = TypeVar("T")


class PerReplica(Generic[T]):
    """One value per replica, in the order of the replicas; they are free to differ.

    Example:
        >>> import lockstep as ls
        >>> ls.PerReplica([1, 2]).values
        (1, 2)
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[T]) -> None:
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
            raise ConfigError(f"PerReplica got {type(values).__name__}; give a list with one value per replica")
        if not values:
            raise ConfigError("PerReplica got no values; give a list with one value per replica")
        self._values = tuple(values)

    @property
    def values(self) -> tuple[T, ...]:
        """The values, in the order of the replicas."""
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __getitem__(self, replica: int) -> T:
        return self._values[replica]

    def __repr__(self) -> str:
        lines = (f"  {replica}: {value!r}" for replica, value in enumerate(self._values))
        return "PerReplica(\n" + "\n".join(lines) + "\n)"


def select(structure: Any, replica: int, num_replicas: int) -> Any:
    """Replica ``replica``'s view of ``structure``: each PerReplica is replaced by that replica's value."""

    def pick(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        if len(leaf) != num_replicas:
            raise ConfigError(
                f"a PerReplica argument has {len(leaf)} values, but the strategy has {num_replicas} replicas; "
                "make it with the same strategy"
            )
        return leaf[replica]

    return tree_map(pick, structure)


def merge(results: Sequence[Any]) -> Any:
    """Joins one result per replica into one structure with PerReplica leaves.

    A leaf that is the very same object on all replicas comes back bare, and so does a plain value (None, a number, a
    string, bytes, a dtype, a device) of the same type and bits on all of them. Tensors, arrays and all other objects go
    by identity alone. Results of different structure (None from one replica, a tensor from another) become a single
    PerReplica.
    """
    flat = [tree_flatten(result) for result in results]
    spec = flat[0][1]
    if any(other != spec for _, other in flat[1:]):
        return PerReplica(list(results))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        column[0] if all(_is_same(value, column[0]) for value in column) else PerReplica(column) for column in columns
    ]
    return tree_unflatten(joined, spec)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, frozenset, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Immutable values, whose identity is the interpreter's choice: it has one object for 5, and two for 1000."""


def _is_same(value: Any, first: Any) -> bool:
    if value is first:
        return True
    if type(value) is not type(first):
        return False
    if isinstance(first, (float, complex)):  # by their bits, which tell 0.0 from -0.0, and a NaN from another
        return struct.pack("dd", value.real, value.imag) == struct.pack("dd", first.real, first.imag)
    numpy = sys.modules.get("numpy")  # whose scalars are plain values too: True and False are one object each
    is_plain = isinstance(first, _PLAIN) or (numpy is not None and isinstance(first, numpy.generic))
    return is_plain and bool(value == first)


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
