"""The leaves of a batch that have rows, and how some of their rows are taken.

A strided tensor gives views of its memory; sparse, nested and packed tensors give new ones with the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from lockstep.data.structure import RowList, RowTuple
from lockstep.errors import DataError

_LAYOUTS = (torch.strided, torch.jagged, torch.sparse_coo, torch.sparse_csr)


def rows_of(leaf: Any) -> int | None:
    """How many rows a leaf has; None for a value that has none."""
    if isinstance(leaf, Tensor):
        return leaf.size(0) if leaf.ndim else None
    if isinstance(leaf, (RowList, RowTuple)):
        return len(leaf)
    return int(leaf.batch_sizes[0]) if isinstance(leaf, PackedSequence) else None


def has_rows(leaf: Any) -> bool:
    """Whether a leaf has rows to divide."""
    return rows_of(leaf) is not None


def view_leaves(view: Any) -> list[Any]:
    """The leaves of a replica's arguments; a list of rows is one."""
    return tree_leaves(view, is_leaf=lambda node: isinstance(node, (RowList, RowTuple)))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor with memory of its own, of which views can be taken."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def check_layout(name: str, leaf: Tensor) -> None:
    """Refuses a tensor of which no rows can be taken.

    Raises:
        DataError: it is neither strided nor nested nor sparse by rows.
    """
    if leaf.layout not in _LAYOUTS:
        raise DataError(
            f"{name} is a tensor of layout {leaf.layout}, of which no rows can be taken; give it strided, as "
            "torch.sparse_coo or as torch.sparse_csr"
        )


def rows_taken(leaf: Any, start: int, size: int) -> Any:
    """``size`` rows of a leaf that has rows, from row ``start`` on.

    Raises:
        DataError: no rows of a nested tensor or a packed sequence, which cannot be empty.
    """
    if isinstance(leaf, (RowList, RowTuple)):
        return type(leaf)(leaf[start : start + size])
    if isinstance(leaf, PackedSequence) or leaf.is_nested:
        if not size:
            raise DataError(
                f"a {'packed sequence' if isinstance(leaf, PackedSequence) else 'nested tensor'} cannot have 0 rows, "
                "which a replica gets where a batch has fewer rows than there are replicas, or where its worker's data "
                "has ended; make every batch of at least as many rows (drop_last=True), or give a padded tensor and "
                "lengths"
            )
        return _packed_rows(leaf, start, size) if isinstance(leaf, PackedSequence) else _nested_rows(leaf, start, size)
    if leaf.layout is torch.sparse_coo:
        return torch.narrow_copy(leaf, 0, start, size)
    if leaf.layout is torch.sparse_csr:
        return _csr_rows(leaf, start, size)
    rows = leaf.narrow(0, start, size)
    # A step may change its shard in place. Views would hand that to autograd as a change of the whole batch, and count
    # it as a change of what the other replicas have kept for their backward passes.
    return rows if leaf.requires_grad else rows.data


def _packed_rows(packed: PackedSequence, start: int, size: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    chosen = slice(start, start + size)
    in_order = packed.sorted_indices is None
    return pack_padded_sequence(padded[chosen], lengths[chosen], batch_first=True, enforce_sorted=in_order)


def _nested_rows(nested: Tensor, start: int, size: int) -> Tensor:
    rows = list(nested.unbind()[start : start + size])
    return torch.nested.as_nested_tensor(rows, layout=nested.layout)


def _csr_rows(matrix: Tensor, start: int, size: int) -> Tensor:
    ends = matrix.crow_indices()[start : start + size + 1]
    first, last = int(ends[0]), int(ends[-1])
    return torch.sparse_csr_tensor(
        ends - first, matrix.col_indices()[first:last], matrix.values()[first:last], size=(size, *matrix.shape[1:])
    )
