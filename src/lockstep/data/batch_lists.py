"""Finds the lists and tuples in a batch that hold one item a row.

    (images [8, 3, 32, 32], ["a.png", "b.png", ...8])      a column, and a list of 8 rows
    ([image, image, ...8], labels [8])                      a list of 8 rows, and a column
    ((x1 [8, 2], x2 [8, 5]), y [8])                         a tuple of two columns, and a column

A list holds rows if it is as long as the tensors outside of lists, and columns if all its tensors are as long as those.
Without tensors outside of lists, lists hold rows if their tensors differ in length, and columns if these agree and the
items of each list are of several kinds. If a list could hold either, the batch is refused. A batch that is itself a
list of two or three tensors of equal length holds columns, [x, y], unless that could be two rows or two images.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from lockstep.checks import check_choice
from lockstep.data.divide import Division
from lockstep.data.structure import (
    RowList,
    RowTuple,
    children,
    is_sequence,
    leaf_has_rows,
    rebuilt,
    root_children,
    rows_of,
)
from lockstep.data.typed_batches import TYPED, is_typed_sequence
from lockstep.errors import DataError

Lists = Literal["auto", "rows", "columns"]
_Mode = Literal["rows", "columns"]

SINGLE_VALUES = (bool, int, float, complex, str, bytes, type(None))
"""Types of values without rows, which every replica gets unchanged."""
_MOST_ITEMS = 3
"""The length of (x, y, sample_weight)."""
_ROOT = ""
"""The name of the batch itself among its lists."""
_CHANNELS = (1, 3, 4)
"""The length of an image's dim 0."""


class ListReader:
    """Finds the lists of rows in the batches of one source. What one batch shows holds for the batches after it.

    Args:
        lists: what lists and tuples are. "rows": those below the root, and a list at the root, have one item a row;
            "columns": they are structure, but for those of strings; "auto": what their lengths say.
        items: the batches are (x, y) or (x, y, sample_weight), be they tuples or lists.
        records_are_rows: a list of anything but tensors that could hold rows or columns holds rows.
        keeps_tuples: a batch that is a list was a list before collation; default_convert turns tuples into lists.
        copies: shards are copies, and no views. The last bits of a product depend on the address and the strides of
            its operands (MKL on an EPYC: on the address modulo 16), and those of a view on how the batch was read.
        division: what the program says of tensors that have other than one row an example.

    Attributes:
        is_item, copies, division: as given, the first as ``items``.
        modes: what the lists of earlier batches held, "rows" or "columns", by name.

    Raises:
        ConfigError: ``lists`` is unknown.
    """

    def __init__(
        self,
        lists: Lists = "auto",
        *,
        items: bool = False,
        records_are_rows: bool = False,
        keeps_tuples: bool = True,
        copies: bool = False,
        division: Division | None = None,
    ) -> None:
        check_choice("lists", lists, get_args(Lists))
        self._lists, self.is_item = lists, items
        self._records_are_rows, self._keeps_tuples = records_are_rows, keeps_tuples
        self.copies, self.division = copies, division
        self.modes: dict[str, _Mode] = {}

    @classmethod
    def of(
        cls,
        dataset: Any,
        lists: Lists = "auto",
        *,
        items: bool = False,
        copies: bool = False,
        division: Division | None = None,
    ) -> ListReader:
        keeps_tuples = True
        if isinstance(dataset, DataLoader) and lists == "auto":
            lists = "columns" if dataset.collate_fn is default_collate else "auto"
            keeps_tuples = dataset.collate_fn is not default_convert
        return cls(lists, items=items, keeps_tuples=keeps_tuples, copies=copies, division=division)

    def marked(self, batch: Any) -> Any:
        """Returns the batch with its lists of rows marked. Raises DataError if one could hold rows or columns."""
        below = root_children(batch, is_item=self.is_item)
        if below is None:
            return batch
        if is_sequence(batch) and self._root_is_rows(batch):
            return _as_rows(batch)
        if not any(is_sequence(child) or _has_lists(child) for _, child in below):
            return batch
        rows = self._num_rows(below)
        return rebuilt(batch, [self._mark(child, name, rows) for name, child in below])

    def tensors_of(self, batch: Any) -> list[Tensor] | None:
        """Returns the tensors of a batch that is nothing but a tuple, list or dict of them; None for any other.

        Nearly every batch is one, and nothing in it can be a list of rows.
        """
        kind = type(batch)
        if kind is dict:
            tensors = list(batch.values())
        elif kind is tuple or (kind is list and (self._lists == "columns" or self.modes.get(_ROOT) == "columns")):
            tensors = list(batch)
        else:
            return None
        if len(tensors) > _MOST_ITEMS and kind is not dict:
            return None
        for tensor in tensors:
            if type(tensor) is not Tensor:
                return None
        return tensors or None

    def _root_is_rows(self, batch: Any) -> bool:
        if self.is_item:
            return False
        if self._lists != "auto":
            return isinstance(batch, list) if self._lists == "rows" else _all_text(batch)
        long = (isinstance(batch, list) and self._keeps_tuples) or len(batch) > _MOST_ITEMS
        if long and len(batch) > 1 and _alike(batch) and _ROOT not in self.modes:
            if not _are_columns(batch):
                raise _unclear(f"the batch of {len(batch)} items")
            self.modes[_ROOT] = "columns"
        return False

    def _num_rows(self, below: list[tuple[str, Any]]) -> int | None:
        """The number of rows of a batch; None if the tensors outside of lists disagree, or nothing tells it."""
        lengths = {rows for _, child in below for leaf in _leaves(child) if (rows := _leaf_rows(leaf)) is not None}
        if not lengths:
            lists = {name: child for name, child in below if is_sequence(child)}
            are_rows = self._lists == "rows" or "rows" in map(self.modes.get, lists)
            inside = (leaf for child in lists.values() for leaf in _leaves(child, lists=True))
            lengths = {rows for leaf in inside if (rows := _leaf_rows(leaf)) is not None}
            if are_rows or len(lengths) > 1:
                lengths = {len(child) for child in lists.values()}
            elif any(_alike(child) for child in lists.values()):
                return None
        return lengths.pop() if len(lengths) == 1 else None

    def _mark(self, node: Any, name: str, rows: int | None) -> Any:
        below = children(node, name)
        if below is None:
            return node
        if is_sequence(node):
            mode = self.modes.get(name) or self._mode(node, name, rows)
            if mode == "rows" or len(node) != 1:  # a list of one item in a batch of one row can be either
                self.modes[name] = mode
            if mode == "rows" and len(node) != rows:
                raise DataError(
                    f"{name} had one item a row in the batches before, and has {len(node)} items in one of {rows} rows;"
                    " give as many as there are rows, and leave a value that is one for all rows out of the batch, or "
                    "give it as a dict"
                )
            if mode == "rows":
                return _as_rows(node)
        return rebuilt(node, [self._mark(child, child_name, rows) for child_name, child in below])

    def _mode(self, node: Any, name: str, rows: int | None) -> _Mode:
        """What a list that no earlier batch had holds. One that can hold neither is refused when it is divided."""
        may_be_rows = len(node) == rows and _alike(node)
        if self._lists != "auto":
            return "rows" if may_be_rows and (self._lists == "rows" or _all_text(node)) else "columns"
        leaves = list(_leaves(node, lists=True))
        if rows is None and _alike(node) and any(_leaf_rows(leaf) is not None for leaf in leaves):
            raise _unclear(name)
        if not may_be_rows:
            return "columns"
        if _all_text(node) or not all(_leaf_rows(leaf) in (None, rows) and _may_divide(leaf) for leaf in leaves):
            return "rows"
        if any(_leaf_rows(leaf) is not None for leaf in leaves):  # of the batch's length, as columns are
            if rows == 1:
                return "columns"
            unclear = not self._records_are_rows or all(_leaf_rows(item) is not None for item in node)
        else:  # numbers: the label of each row, or the height and width of all
            unclear = 1 < len(node) <= _MOST_ITEMS and _kind(node[0]) == "number" and not self._records_are_rows
        if unclear:
            raise _unclear(name)
        return "rows"


def _unclear(name: str) -> DataError:
    return DataError(
        f"{name} may be a list of one item a row, or of columns that each have all rows; give rows as one tensor "
        "(torch.stack, or padded to one length), columns in a dict, or say which it is: "
        'strategy.distribute_dataset(data, lists="rows") or lists="columns"'
    )


def _are_columns(batch: Any) -> bool:
    """Whether the items of a batch are two or three tensors with all rows each, and not as many rows or images."""
    lengths = {_leaf_rows(item) for item in batch}
    if len(batch) > _MOST_ITEMS or len(lengths) > 1 or lengths <= {None, len(batch)}:
        return False
    return batch[0].ndim != 3 or lengths.isdisjoint(_CHANNELS)


def _has_lists(node: Any) -> bool:
    return any(is_sequence(child) or _has_lists(child) for _, child in children(node, "") or ())


def _leaves(node: Any, *, lists: bool = False) -> Iterator[Any]:
    """The leaves of a node; those inside of lists only if ``lists``."""
    below = children(node, "")
    if below is None:
        yield node
    elif lists or not is_sequence(node):
        for _, child in below:
            yield from _leaves(child, lists=lists)


def _as_rows(node: Any) -> Any:
    if is_typed_sequence(node) and not isinstance(node, TYPED):
        kind = "list" if isinstance(node, list) else "tuple"
        warnings.warn(
            f"a batch holds a {type(node).__name__} of one item a row, and each replica gets a {kind} of its rows, "
            f"without other attributes; give a {kind}, or one tensor of the rows",
            stacklevel=2,
        )
    return RowList(node) if isinstance(node, list) else RowTuple(node)


def _leaf_rows(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) or leaf_has_rows(leaf):
        return rows_of(leaf)
    numpy = sys.modules.get("numpy")
    return len(leaf) if numpy and isinstance(leaf, numpy.ndarray) and leaf.ndim else None


def _may_divide(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(leaf, (*SINGLE_VALUES, Tensor)) or bool(
        numpy and isinstance(leaf, (numpy.ndarray, numpy.generic))
    )


def _all_text(node: Any) -> bool:
    return bool(node) and all(isinstance(item, (str, bytes)) for item in node)


def _alike(items: Iterable[Any]) -> bool:
    """Whether all items are of one kind, as rows are."""
    return len({_kind(item) for item in items if item is not None and not (is_sequence(item) and not item)}) <= 1


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor):
        return "tensor", item.dtype, item.ndim
    if isinstance(item, Mapping):
        return "mapping", frozenset(item)
    if isinstance(item, (int, float, complex)):
        return "number"
    if is_sequence(item):  # a sample, such as (image, label), or a list of numbers
        return "sequence", _kind(item[0]) if item else None
    return type(item)
