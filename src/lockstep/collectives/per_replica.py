"""Values that differ by replica: ``PerReplica``, and ``VariableBase``, the base class of a strategy's variables.

``select`` takes one replica's view of a structure on the way in; ``merge`` joins the replicas' results on the way out.
Structures are those of ``torch.utils._pytree``: tuples, lists, dicts, named tuples. A PerReplica is a leaf.
In an expression a variable is its value in the calling replica, as a ``tf.Variable`` is.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import torch

from lockstep._torch_compat import is_leaf_kind, tree_flatten, tree_map, tree_unflatten
from lockstep.errors import ConfigError, UsageError
from lockstep.introspection import is_kind

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
        # Asked of an abstract class, a list takes 0.4 us to be a sequence, twice a batch.
        if type(values) is not list and (isinstance(values, (str, bytes)) or not isinstance(values, Sequence)):
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


class PartsOfExamples(PerReplica[T]):
    """Parts of a flat tensor, in which dim 0 is not one row an example; ``examples`` is their number in each part."""

    __slots__ = ("examples",)

    def __init__(self, values: Sequence[T], examples: Sequence[int]) -> None:
        super().__init__(values)
        self.examples = tuple(examples)


def with_values(old: PerReplica[Any], values: Sequence[T]) -> PerReplica[T]:
    """Other values in place of those of ``old``, such as copies on other devices."""
    return PartsOfExamples(values, old.examples) if isinstance(old, PartsOfExamples) else PerReplica(values)


LEAVES: frozenset[type] = frozenset([torch.Tensor, PerReplica, int, float, bool, str, bytes, type(None)])
"""Exact types of most leaves. Tuples, lists and dicts of them are walked without torch's pytree: a pair of tensors
takes 1.2 microseconds in place of 9.7 (torch 2.13), several times a step."""


def select(structure: Any, replica: int, num_replicas: int) -> Any:
    """Replica ``replica``'s view of ``structure``: each PerReplica is replaced by that replica's value."""
    kind = type(structure)
    if kind is PerReplica:
        return value_of(structure, replica, num_replicas)
    if kind in LEAVES:
        return structure
    if kind is tuple or kind is list:
        return kind([select(node, replica, num_replicas) for node in structure])
    if kind is dict:
        return {key: select(node, replica, num_replicas) for key, node in structure.items()}
    if is_leaf_kind(kind) and not issubclass(kind, PerReplica):
        return structure
    leaves, spec = tree_flatten(structure)
    for at, leaf in enumerate(leaves):
        if issubclass(type(leaf), PerReplica):
            leaves[at] = value_of(leaf, replica, num_replicas)
    return tree_unflatten(leaves, spec)


def value_of(values: PerReplica[T], replica: int, num_replicas: int) -> T:
    """The value of a replica. Raises ConfigError if there are other values than one for each of ``num_replicas``."""
    if len(values._values) != num_replicas:
        raise ConfigError(
            f"a PerReplica argument has {len(values._values)} values, but the strategy has {num_replicas} replicas; "
            "make it with the same strategy"
        )
    return values._values[replica]


def merge(results: Sequence[Any]) -> Any:
    """Joins one result per replica into one structure with PerReplica leaves.

    A leaf that is the very same object on all replicas comes back bare, and so does a plain value (None, a number, a
    string, bytes, a dtype, a device) of the same type and bits on all of them. Tensors, arrays and all other objects go
    by identity alone. Results of different structure (None from one replica, a tensor from another) become a single
    PerReplica.
    """
    if len(results) == 1:
        return results[0]
    if all(type(result) in LEAVES for result in results):
        return _merged(tuple(results))
    leaves, spec = tree_flatten(results[0])
    leaves_of_all = [leaves]
    for result in results[1:]:
        leaves, other_spec = tree_flatten(result)
        if other_spec != spec:
            return PerReplica(list(results))
        leaves_of_all.append(leaves)
    return tree_unflatten([_merged(column) for column in zip(*leaves_of_all, strict=True)], spec)


def _merged(column: tuple[Any, ...]) -> Any:
    """The value that is the same on all replicas, or a PerReplica."""
    for value in column[1:]:
        if not _is_same(value, column[0]):
            return PerReplica(column)
    return column[0]


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, frozenset, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Immutable values, whose identity is the interpreter's choice: it has one object for 5, and two for 1000."""


def _is_same(value: Any, first: Any) -> bool:
    if value is first:
        return True
    if type(value) is not type(first) or type(first) is torch.Tensor:
        return False
    # By their bits, which tell 0.0 from -0.0, and for which a NaN is equal to itself.
    if is_kind(first, (float, complex)):
        return struct.pack("dd", value.real, value.imag) == struct.pack("dd", first.real, first.imag)
    # NumPy's scalars are plain values too. It is not imported for that: a value of it shows that it is there.
    numpy = sys.modules.get("numpy")
    is_plain = is_kind(first, _PLAIN) or (numpy is not None and is_kind(first, numpy.generic))
    return is_plain and bool(value == first)


_WRITE = "write it with assign, assign_add or assign_sub"
_OF_THE_OBJECT = ("data", "grad", "grad_fn", "backward", "register_hook", "retain_grad")
_SAME_FOR_ALL = ("shape", "dtype", "device", "ndim", "size", "dim", "numel")
"""Attributes that are equal in all replicas."""


def _reads(*names: str) -> Iterator[Callable[..., Any]]:
    """The operators of these names of a variable's value."""
    for name in names:
        yield lambda self, *operands, _name=name: getattr(self.read_value(), _name)(*read_tensors(operands))


class VariableBase(ABC):
    """The base class of a strategy's variables: what can be read of one, and how it takes part in expressions.

    Operators, conversions and torch's functions see ``read_value()``; those that would write into it are refused.
    """

    # NumPy's arrays leave "array * variable" to the variable, as they do for tensors, which have the same number.
    __array_priority__ = 1000

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_") or name in _OF_THE_OBJECT:
            raise UsageError(f"a variable has no {name!r}, which would write into a copy of its value; {_WRITE}")
        return getattr(self.per_replica[0] if name in _SAME_FOR_ALL else self.read_value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(torch.Tensor, name) and not name.startswith("_"):
            raise UsageError(f"{name!r} of a variable cannot be set; write it with assign, assign_add or assign_sub")
        super().__setattr__(name, value)

    def numpy(self) -> Any:
        return self.read_value().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        read: list[tuple[torch.Tensor, int]] = []

        def value(leaf: Any) -> Any:
            if not is_kind(leaf, VariableBase):
                return leaf
            # Inference tensors count no writes, and the count below tells a function that would write to the copy.
            with torch.inference_mode(False):
                tensor = leaf.read_value()
            read.append((tensor, tensor._version))
            return tensor

        args, kwargs = tree_map(value, (tuple(args), dict(kwargs or {})))
        result = func(*args, **kwargs)
        if any(tensor._version != version for tensor, version in read):
            raise UsageError(f"{getattr(func, '__name__', func)} would write into a copy of a variable; {_WRITE}")
        return result

    def _in_place(self, other: Any) -> NoReturn:
        raise UsageError(f"an operator such as += does not write a variable; {_WRITE}")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _in_place
    __iand__ = __ior__ = __ixor__ = _in_place
    # A class with __eq__ loses its hash. Comparisons are elementwise, as for tensors, so the hash goes by identity.
    __hash__ = object.__hash__
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = _reads("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
    __bool__, __float__, __int__, __index__ = _reads("__bool__", "__float__", "__int__", "__index__")
    __neg__, __abs__, __invert__, __len__ = _reads("__neg__", "__abs__", "__invert__", "__len__")
    __getitem__, __format__ = _reads("__getitem__", "__format__")
    __add__, __radd__, __sub__, __rsub__ = _reads("__add__", "__radd__", "__sub__", "__rsub__")
    __mul__, __rmul__, __matmul__, __rmatmul__ = _reads("__mul__", "__rmul__", "__matmul__", "__rmatmul__")
    __truediv__, __rtruediv__, __pow__, __rpow__ = _reads("__truediv__", "__rtruediv__", "__pow__", "__rpow__")
    __floordiv__, __rfloordiv__, __mod__, __rmod__ = _reads("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__")
    __and__, __rand__, __or__, __ror__ = _reads("__and__", "__rand__", "__or__", "__ror__")


def read_tensors(structure: Any) -> Any:
    """``structure`` with each variable replaced by its value in the calling replica."""
    return tree_map(lambda leaf: leaf.read_value() if is_kind(leaf, VariableBase) else leaf, structure)


def read_per_replica(structure: Any) -> Any:
    """``structure`` with each variable replaced by its values in all local replicas."""
    if is_leaf_kind(type(structure)) and not is_kind(structure, VariableBase):
        return structure
    return tree_map(lambda leaf: leaf.per_replica if is_kind(leaf, VariableBase) else leaf, structure)


def is_mirrored(value: Any) -> bool:
    """Whether it is a variable that is equal in all replicas."""
    return is_kind(value, VariableBase) and value.is_mirrored


def read_for_reduction(structure: Any) -> Any:
    """The same, but the bare value of a variable that is equal in all replicas: a mean over them would round it."""

    def value(leaf: Any) -> Any:
        if not is_kind(leaf, VariableBase):
            return leaf
        return leaf.read_value() if is_mirrored(leaf) else leaf.per_replica

    return tree_map(value, structure)
