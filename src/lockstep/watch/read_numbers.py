"""Finds numbers that a step reads from the rows of each shard by Python or NumPy, and then computes a loss with.

    weight = (y == 0).sum().item() / (y == 1).sum().item()      read here, and a number of Python's from here on
    F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(weight))        other in each replica

No torch function stands between such a number and the rows, so they cannot be followed. What tells them is that
replicas which run the same calls have other numbers in them: on one device there is one batch, and one number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction, tree_leaves
from lockstep.collectives.communicator import call_site

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
_SAME = 1e-6  # numbers that differ by less are the same but for rounding


@dataclass(frozen=True, slots=True)
class ReadNumber:
    """A call with numbers in it, of a step that has read some from rows before."""

    name: str
    numbers: tuple[float, ...]
    site: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that differs between two replicas at the same call."""

    name: str
    site: str
    first: float
    other: float

    def __str__(self) -> str:
        where = f" ({self.site})" if self.site else ""
        return f"{self.name}{where} with {self.first:.6g} in one replica and {self.other:.6g} in another"


class ReadNumbers:
    """The numbers in calls of one replica's step whose results have gradients, from the first reading of rows on.

    Args:
        rows: the number of rows of the shard.
        batch: the leaves of the shard.
    """

    def __init__(self, rows: int, batch: Sequence[Any]) -> None:
        self.rows = rows
        self.calls: list[ReadNumber] = []
        self._made: dict[int, ref[Tensor]] = {}  # tensors that were made of numbers
        self._storages = {_address(leaf) for leaf in batch if isinstance(leaf, Tensor)}

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes the numbers of a call that was made."""
        leaves = tree_leaves((args, kwargs))
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self._is_made_of_numbers(leaf)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(output.requires_grad for output in outputs):
            name = getattr(func, "__name__", str(func)).strip("_")
            numbers = [number for leaf in leaves if (number := _number(leaf, name)) is not None]
            numbers += [number for tensor in made for number in tensor.detach().flatten().tolist()]
            if numbers:
                self.calls.append(ReadNumber(name, tuple(numbers), call_site()))
        elif func in _MAKERS or made:
            self._made.update({id(output): ref(output) for output in outputs if self._may_be_numbers(output)})

    def _is_made_of_numbers(self, tensor: Tensor) -> bool:
        if (reference := self._made.get(id(tensor))) is not None and reference() is tensor:
            return True
        # torch.from_numpy calls no function mode; its memory is NumPy's, which torch cannot resize.
        is_numpys = not tensor.requires_grad and tensor.device.type == "cpu" and not _is_resizable(tensor)
        return is_numpys and self._may_be_numbers(tensor) and _address(tensor) not in self._storages

    def _may_be_numbers(self, tensor: Tensor) -> bool:
        """Whether a tensor is neither one value a row nor indices."""
        is_small = tensor.layout is torch.strided and tensor.numel() <= _MOST
        return is_small and tensor.is_floating_point() and (not tensor.ndim or tensor.shape[0] != self.rows)


def difference_among(replicas: Sequence[ReadNumbers]) -> Difference | None:
    """The first number that differs among replicas whose steps made the same calls up to it; None if there is none."""
    if not replicas:
        return None
    first, *others = replicas
    for other in others:
        for call, same in zip(first.calls, other.calls, strict=False):
            if (call.name, call.site, len(call.numbers)) != (same.name, same.site, len(same.numbers)):
                break  # the replicas took different branches
            for mine, theirs in zip(call.numbers, same.numbers, strict=True):
                if not _are_alike(mine, theirs, first.rows, other.rows):
                    return Difference(call.name, call.site, mine, theirs)
    return None


def _are_alike(first: float, other: float, rows: int, rows_of_other: int) -> bool:
    """Whether two numbers are one but for rounding, or are that for each row, as a shard's part of the batch is."""
    pairs = [(first, other), (first * rows_of_other, other * rows), (first * rows, other * rows_of_other)]
    return any(a == b or math.isclose(a, b, rel_tol=_SAME) for a, b in pairs) or (first != first and other != other)


def _number(leaf: Any, name: str) -> float | None:
    numpy: Any = sys.modules.get("numpy")
    is_whole = type(leaf) is int or (numpy is not None and issubclass(type(leaf), numpy.integer))
    is_float = issubclass(type(leaf), float) or (numpy is not None and issubclass(type(leaf), numpy.floating))
    return float(leaf) if is_float or (is_whole and name in _ARITHMETIC) else None


def _address(tensor: Tensor) -> int:
    with DisableTorchFunction():
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_resizable(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().resizable()
