"""The note on an error of a replica: which replica it was, and what its shard may have to do with the error.

A step that works on a whole batch can fail on a shard of it: on a fixed size, on one row, on a shorter longest row. The
advice for such a mistake is given where the message of the error has the sizes that the mistake leads to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.data.structure import replica_leaves, rows_of
from lockstep.errors import LockstepError
from lockstep.introspection import is_kind

_NO_ROWS = (
    "which has 0 rows, since the batch has fewer rows than the {replicas} replicas; where the step cannot take 0 rows, "
    "make every batch of at least {replicas} rows (drop_last=True, or another batch_size), or run forward and backward "
    "only where there are rows (if ls.has_rows(batch): ...); optimizer.step() and other collectives belong in every "
    "replica"
)
_ONE_ROW = (
    "if the step or module loses dim 0 of one row, name the dimension that goes (.squeeze(1) for .squeeze()), or give "
    "batches that leave no shard with 1 row (drop_last=True, or another batch_size)"
)
_FIXED = (
    "a size of the whole batch (.view({batch}, ...), .reshape, .expand) does not fit its shards, so take it from the "
    "tensor (len(x), or -1)"
)
_SHORTER = (
    "the longest row of a shard can be shorter than that of the batch, so give pad_packed_sequence "
    "total_length=x.size(1), and pad masks and targets to the same length"
)
_GROUPS = "pairs or groups of rows may be cut by the border of a shard, so give batches [groups, rows of a group, ...]"
_SHAPE_ERRORS = (RuntimeError, ValueError, IndexError, AssertionError)
_SPEAKS_OF_SHAPES = re.compile(r"\b(sizes?|shapes?|dim(ension)?s?|length|elements|batch|batch_size)\b", re.IGNORECASE)
_SIZES_OF_WEIGHTS = re.compile("mat1 and mat2|weight of size|normalized_shape|running_mean")
_VIEW = re.compile(r"shape '\[([-\d, ]*)\]' is invalid for input of size (\d+)")


class WithRows:
    """The base class of an argument of steps that is a shard, and no structure of tensors."""

    inputs: Any
    rows: int


@dataclass(frozen=True, kw_only=True)
class ShardNotes:
    """Makes the note on an error of a replica, for one run."""

    shards: Sequence[Sequence[Any]]  # the leaves of each local replica's arguments
    replicas: int  # the number in all workers
    distributed: bool  # whether the arguments are a part of a batch
    worker: int | None = None  # which one this is, among several

    def note(self, name: str, replica: int, error: BaseException) -> str:
        """The note on an error of the local replica of that number; empty where there is no other replica."""
        if self.replicas == 1:
            return ""
        place = f"raised in {name}" + ("" if self.worker is None else f" of worker {self.worker}")
        return ", ".join([place, *self._of_shard(replica, error)])

    def _of_shard(self, replica: int, error: BaseException) -> list[str]:
        """What to add of the replica's shard, if anything."""
        if not self.distributed or not isinstance(error, Exception):
            return []
        if any(rows_of(leaf) == 0 for leaf in self.shards[replica]):
            return [_NO_ROWS.format(replicas=self.replicas)]
        sizes = [next((rows for leaf in leaves if (rows := _rows_in(leaf)) is not None), 0) for leaves in self.shards]
        rows, batch = sizes[replica], sum(sizes) if len(sizes) == self.replicas else 0
        speaks_of_shapes = isinstance(error, _SHAPE_ERRORS) and _SPEAKS_OF_SHAPES.search(str(error))
        # Our own errors say what to do about a shape, but not that a lost dimension may be that of the only row.
        if not speaks_of_shapes or not rows or rows == batch or (isinstance(error, LockstepError) and rows > 1):
            return []
        part = f"which has {rows} of the {batch} rows of the batch" if batch else f"which has {rows} rows of the batch"
        leaves = [tensor for leaf in self.shards[replica] for tensor in _tensors(leaf)]
        return ["; ".join([part, *_advice(str(error), leaves, rows, batch, self.replicas)])]


def _advice(message: str, leaves: Sequence[Tensor], rows: int, batch: int, replicas: int) -> Iterator[str]:
    """What to do about the mistakes that may have led to ``message``, on a shard of so many rows of a batch.

    ``batch`` is 0 if only other workers know the rest of it.
    """
    if _SIZES_OF_WEIGHTS.search(message):
        return
    if rows == 1:
        yield _ONE_ROW
    numbers = {int(number) for number in re.findall(r"\d+", message)}
    wholes = {size for size in numbers if (size == batch if batch else _is_share(rows, size, replicas))}
    view = _VIEW.search(message)
    of_rows = "dimension 0" in message and rows in numbers
    if view is not None:
        text, elements = view.groups()
        sizes = [int(size) for size in text.split(",")]
        in_batch = int(elements) * batch // rows if batch else int(elements) * replicas
        fits_batch = in_batch % math.prod(size for size in sizes if size > 0) == 0
        is_fixed, cuts = fits_batch and -1 not in sizes, fits_batch and -1 in sizes
    else:
        is_fixed, cuts = bool(wholes) or of_rows, of_rows or sum(numbers) == rows
    if is_fixed:
        yield _FIXED.format(batch=batch or "rows")
    if _is_shorter(numbers, leaves, rows):
        yield _SHORTER
    if cuts:
        yield _GROUPS


def _is_share(rows: int, size: int, replicas: int) -> bool:
    """Whether a batch of that size gives one of so many replicas this number of rows."""
    return size > rows and size // replicas <= rows <= -(-size // replicas)


def _is_shorter(numbers: set[int], leaves: Sequence[Tensor], rows: int) -> bool:
    """Whether both the length to which the shard is padded and that of its longest row are among the sizes told.

    Lengths are in a tensor of whole numbers, one for each row, or are counts of what is not 0 in each row.
    """
    padded = {leaf.size(1) for leaf in leaves if leaf.ndim > 1}
    for leaf in leaves:
        if leaf.ndim in (1, 2) and leaf.numel() and leaf.device.type == "cpu" and not leaf.dtype.is_floating_point:
            longest = int((leaf if leaf.ndim == 1 else leaf.ne(0).sum(1)).max())
            pairs = [(longest * unit, length * unit) for unit in (1, rows) for length in padded if longest < length]
            if any(numbers.issuperset(pair) for pair in pairs):
                return True
    return False


def _tensors(leaf: Any) -> list[Tensor]:
    leaves = replica_leaves(leaf.inputs) if is_kind(leaf, WithRows) else [leaf]
    return [tensor for tensor in leaves if is_kind(tensor, Tensor)]


def _rows_in(leaf: Any) -> int | None:
    return leaf.rows if is_kind(leaf, WithRows) else rows_of(leaf)
