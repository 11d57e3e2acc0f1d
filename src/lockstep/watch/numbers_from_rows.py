"""Finds numbers that a step reads from the rows of each shard by Python or NumPy, and then computes a loss with.

    weight = (y == 0).sum().item() / (y == 1).sum().item()      read here, and a number of Python's from here on
    F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(weight))        other in each replica

No torch function stands between such a number and the rows, so they cannot be followed. What tells them is that
replicas which run the same calls have other numbers in them: on one device there is one batch, and one number. A value
that a module has kept from an earlier step, such as a mean over its rows, is told in the same way.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction, tree_leaves
from lockstep.collectives.communicator import call_site, calling_frame
from lockstep.introspection import is_kind

_MAKERS = frozenset(
    [
        *(torch.tensor, torch.as_tensor, torch.asarray, torch.full, torch.scalar_tensor),
        *(Tensor.new_tensor, Tensor.new_full),
    ]
)
_ARITHMETIC = frozenset(
    f"{prefix}{name}" for prefix in ("", "r", "i") for name in ("add", "sub", "mul", "div", "truediv", "pow")
) | frozenset(["true_divide", "divide", "multiply", "subtract", "floordiv"])
"""Functions in which a whole number is a value; in others it may be a size, an index or a dimension."""
_MOST = 4096  # entries of a tensor made of numbers, such as weights of classes; larger ones are data
_SAMPLED = 16  # numbers of a value that is kept
_SAME = 1e-6  # numbers that differ by less are the same but for rounding


@dataclass(frozen=True, slots=True)
class ReadNumber:
    """A call with numbers in it, of a step that has read some from rows before, or a value kept from such a step."""

    name: str
    numbers: tuple[float, ...]
    site: str
    instruction: tuple[int, int]  # the code that makes the call, and where in it
    in_module: bool
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that differs between two replicas at the same call."""

    call: ReadNumber
    first: float
    other: float

    @property
    def is_kept(self) -> bool:
        """Whether a module has kept it from an earlier step."""
        return self.call.is_kept

    def __str__(self) -> str:
        where = f" ({self.call.site})" if self.call.site else ""
        return f"{self.call.name}{where} with {self.first:.6g} in one replica and {self.other:.6g} in another"


class ReadNumbers:
    """The numbers in calls of one replica's step that a loss is computed with, from the first reading of rows on.

    Args:
        rows: the number of rows of the shard.
        inputs: the leaves of the shard, and the buffers of its modules: tensors that are not made of numbers although
            torch cannot resize their storage. ``Tensor.numpy()``, by which checkpoints read buffers, leaves it so.
        module_state: tensors that modules have kept from an earlier step, and that depended on all its rows, by name.
    """

    def __init__(self, rows: int, inputs: Sequence[Any], module_state: Mapping[str, Tensor]) -> None:
        self.rows = rows
        self.calls: list[ReadNumber] = []  # that come into a gradient
        self._number_tensors: dict[int, ref[Tensor]] = {}  # tensors that were made of numbers
        self._origins: dict[int, tuple[ref[Tensor], tuple[ReadNumber, ...]]] = {}  # of others without gradients
        self._storages = {_address(leaf) for leaf in inputs if is_kind(leaf, Tensor)}
        for name, tensor in module_state.items():
            origin = ReadNumber(name, _values(tensor), "", (0, 0), in_module=True, is_kept=True)
            self._origins[id(tensor)] = ref(tensor), (origin,)

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, in_module: bool
    ) -> None:
        """Notes the numbers of a call that was made; ``in_module`` says whether a mirrored module made it."""
        outputs = [leaf for leaf in tree_leaves(result) if is_kind(leaf, Tensor) and leaf.is_floating_point()]
        # torch.tensor(weight) brings a number of Python's into torch: from here on its tensor stands for the number.
        if func in _MAKERS:
            self._number_tensors.update({id(output): ref(output) for output in outputs if self._may_be_numbers(output)})
            return
        name = getattr(func, "__name__", str(func)).strip("_")
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if is_kind(leaf, Tensor)]
        origins = [origin for tensor in tensors for origin in self._origins_of(tensor)]
        numbers = [number for leaf in leaves if (number := _number(leaf, name)) is not None]
        numbers += [number for tensor in tensors if self._is_made_of_numbers(tensor) for number in _values(tensor)]
        if numbers:
            origins.append(ReadNumber(name, tuple(numbers), call_site(), _instruction(), in_module))
        if any(output.requires_grad for output in outputs):
            self.calls += [origin for origin in origins if not origin.is_kept or origin not in self.calls]
        elif origins:
            targets = [args[0]] if func is Tensor.__setitem__ else outputs
            unique = tuple(dict.fromkeys(origins))
            self._origins.update({id(target): (ref(target), unique) for target in targets})

    def _origins_of(self, tensor: Tensor) -> Sequence[ReadNumber]:
        """The numbers that a tensor without gradients was computed from."""
        reference, origins = self._origins.get(id(tensor), (None, ()))
        return origins if reference is not None and reference() is tensor else ()

    def _is_made_of_numbers(self, tensor: Tensor) -> bool:
        if (reference := self._number_tensors.get(id(tensor))) is not None and reference() is tensor:
            return True
        # torch.from_numpy calls no function mode; its memory is NumPy's, which torch cannot resize.
        is_numpys = not tensor.requires_grad and tensor.device.type == "cpu" and not _is_resizable(tensor)
        return is_numpys and self._may_be_numbers(tensor) and _address(tensor) not in self._storages

    def _may_be_numbers(self, tensor: Tensor) -> bool:
        """Whether a tensor is neither one value a row nor indices."""
        is_small = tensor.layout is torch.strided and tensor.numel() <= _MOST
        return is_small and tensor.is_floating_point() and (not tensor.ndim or tensor.shape[0] != self.rows)


def difference_among(replicas: Sequence[ReadNumbers], *, only_in_modules: bool) -> Difference | None:
    """The first number that differs among replicas in a call that each of them has made once; None if there is none.

    A call that a replica makes several times is one for each row, or for each piece of the shard.
    """
    if not replicas:
        return None
    first, *rest = replicas
    calls = _called_once(first.calls, only_in_modules)
    for other in rest:
        calls_of_other = _called_once(other.calls, only_in_modules)
        for key, call in calls.items():
            numbers = zip(call.numbers, calls_of_other[key].numbers, strict=False) if key in calls_of_other else ()
            for number, number_of_other in numbers:
                if not _are_alike(number, number_of_other, first.rows, other.rows):
                    return Difference(call, number, number_of_other)
    return None


def _called_once(calls: Sequence[ReadNumber], only_in_modules: bool) -> dict[Any, ReadNumber]:
    # By code and position in it, not by line: several calls of one line are different numbers.
    times = Counter((call.name, call.instruction) for call in calls)
    return {
        (call.name, call.instruction): call
        for call in calls
        if times[call.name, call.instruction] == 1 and (call.in_module or not only_in_modules)
    }


def _instruction() -> tuple[int, int]:
    frame = calling_frame()
    return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)


def _are_alike(first: float, other: float, rows: int, rows_of_other: int) -> bool:
    """Whether two numbers are one but for rounding, or are that for each row, as a shard's part of the batch is."""
    pairs = [(first, other), (first * rows_of_other, other * rows), (first * rows, other * rows_of_other)]
    return any(a == b or math.isclose(a, b, rel_tol=_SAME) for a, b in pairs) or (first != first and other != other)


def _number(leaf: Any, name: str) -> float | None:
    numpy: Any = sys.modules.get("numpy")
    is_whole = type(leaf) is int or (numpy is not None and issubclass(type(leaf), numpy.integer))
    is_float = issubclass(type(leaf), float) or (numpy is not None and issubclass(type(leaf), numpy.floating))
    return float(leaf) if is_float or (is_whole and name in _ARITHMETIC) else None


def _values(tensor: Tensor) -> tuple[float, ...]:
    return tuple(tensor.detach().flatten()[:_SAMPLED].tolist())


def _address(tensor: Tensor) -> int:
    with DisableTorchFunction():
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_resizable(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().resizable()
