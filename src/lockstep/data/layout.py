"""Finds what in a batch has rows: tensors along dim 0, and the lists and tuples that hold one item a row.

    (images [8, 3, 32, 32], ["a.png", "b.png", ...8])      a column, and a list of 8 rows
    ([image, image, ...8], [{"boxes": ...}, ...8])         two lists of 8 rows
    ((x1 [8, 2], x2 [8, 5]), y [8])                        a tuple of two columns, and a column

A list holds rows if it is as long as the batch, and columns if all its tensors are as long as the batch. The length of
the batch is that of the tensors outside of lists or, if there are none, the batch size of the DataLoader. If a list
could hold either, or nothing tells the length, the batch is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from lockstep.data.sources import batches_in
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
from lockstep.errors import ConfigError, DataError

Lists = Literal["auto", "rows", "columns"]
_Mode = Literal["rows", "columns"]

SINGLE_VALUES = (bool, int, float, complex, str, bytes, type(None))
"""Types of values without rows, which every replica gets unchanged."""
_MOST_ITEMS = 3
"""The length of (x, y, sample_weight)."""


@dataclass
class _Fit:
    """One reading of a part of a batch, for some number of rows.

    Args:
        rows: whether anything in it has rows.
        modes: what each list in it is, by name.
        unclear: the names of lists that could hold rows or columns.
        of: that number of rows, in a reading of a whole batch.
    """

    rows: bool
    modes: dict[str, _Mode] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)
    of: int | None = None


class BatchLayout:
    """Finds the lists of rows in the batches of one source. What one batch shows holds for the batches after it.

    Args:
        lists: what lists and tuples are. "rows": those below the root, and a list at the root, have one item a row;
            "columns": they are structure, but for those of strings; "auto": what their lengths say.
        sizes: the known numbers of rows of this source's batches, the usual one first.
        items: the batches are (x, y) or (x, y, sample_weight), be they tuples or lists.
        records_are_rows: a list of anything but tensors that could hold rows or columns holds rows.
        keeps_tuples: a batch that is a list was a list before collation; default_convert turns tuples into lists.

    Raises:
        ConfigError: ``lists`` is unknown.
    """

    def __init__(
        self,
        lists: Lists = "auto",
        *,
        sizes: Sequence[int] = (),
        items: bool = False,
        records_are_rows: bool = False,
        keeps_tuples: bool = True,
    ) -> None:
        if lists not in get_args(Lists):
            raise ConfigError(f'lists={lists!r} is unknown; choose "auto", "rows" or "columns"')
        self._lists = lists
        self._sizes = tuple(sizes)
        self._items = items
        self._records_are_rows = records_are_rows
        self._keeps_tuples = keeps_tuples
        self._known: dict[str, _Mode] = {}

    @classmethod
    def of(cls, dataset: Any, lists: Lists = "auto", *, items: bool = False) -> BatchLayout:
        """Returns the layout of the batches of ``dataset``."""
        if not isinstance(dataset, DataLoader) or lists != "auto":
            return cls(lists, items=items)
        if dataset.collate_fn is default_collate:
            return cls("columns", items=items)
        tuples = dataset.collate_fn is not default_convert
        return cls(lists, sizes=_loader_sizes(dataset), items=items, keeps_tuples=tuples)

    def marked(self, batch: Any, *, rows: int | None = None) -> Any:
        """Returns the batch with its lists and tuples of rows as RowList and RowTuple.

        Args:
            batch: a global batch.
            rows: the number of rows that were loaded for it, if known.

        Raises:
            DataError: a list could hold rows or columns.
        """
        below = root_children(batch)
        if below is None:
            return batch
        sizes = self._sizes if rows is None else (rows,)
        if is_sequence(batch) and self._root_is_rows(batch, below, sizes):
            return _as_rows(batch)
        if not _has_sequences(below):
            return batch
        fit = self._fit_root(below, sizes)
        if fit is None:
            self._check_known(below)
            return batch  # the tensors disagree in length, which dividing the batch reports
        if fit.unclear:
            raise self._unclear(fit.unclear[0])
        self._known.update(fit.modes)
        return _marked(batch, below, "batch", fit.modes)

    def _check_known(self, below: list[tuple[str, Any]]) -> None:
        """Refuses a list that had one item a row before, and now has another number of items than there are rows."""
        tensors = _tensor_lengths(below)
        for name, node in _sequences(below):
            if self._known.get(name) == "rows" and len(tensors) == 1 and len(node) not in tensors:
                raise DataError(
                    f"{name} had one item a row in the batches before, and has {len(node)} items in one of "
                    f"{next(iter(tensors))} rows; give as many as there are rows, and leave a value that is one for "
                    "all rows out of the batch, or give it as a dict"
                )

    def _root_is_rows(self, batch: Any, below: list[tuple[str, Any]], sizes: Sequence[int]) -> bool:
        if self._items:
            return False
        if self._lists != "auto":
            return isinstance(batch, list) if self._lists == "rows" else _all_text(batch)
        if "batch" in self._known:
            return self._known["batch"] == "rows"
        for size in (*sizes, None):
            rows, columns = self._root_readings(batch, below, size)
            if rows and columns:
                raise self._unclear("the batch", batch)
            if rows or columns:
                self._known["batch"] = "rows" if rows else "columns"
                return rows
        return False

    def _root_readings(self, batch: Any, below: list[tuple[str, Any]], size: int | None) -> tuple[bool, bool]:
        """Whether a batch of ``size`` rows that is a list or tuple may hold rows, and whether it may hold columns."""
        fit = self._fit_root(below, () if size is None else (size,))
        columns = fit is not None and (size is None or fit.of == size)
        if not _alike(batch) or all(isinstance(each, SINGLE_VALUES) for each in batch):
            return size is not None and len(batch) == size and _alike(batch), columns
        if size is not None:
            return len(batch) == size and not (size == 1 and columns), columns
        long = (isinstance(batch, list) and self._keeps_tuples) or len(batch) > _MOST_ITEMS
        return columns and len(batch) > 1 and long, columns

    def _fit_root(self, below: list[tuple[str, Any]], sizes: Sequence[int]) -> _Fit | None:
        """The reading of a batch whose root is structure; None if there is none.

        Args:
            below: the children of the root.
            sizes: the numbers of rows that the batch may have, the likeliest first; empty if unknown.
        """
        anchors = _anchors(below)
        if len(anchors) > 1:
            return None
        if not anchors and not sizes and self._lists != "rows" and not _has_rows(below):
            return None  # a single example has lists, too
        lengths = anchors or (self._list_lengths(below) if self._lists == "rows" else self._lengths(below))
        for size in sizes:
            if size in lengths and (fit := self._fit_of(below, size)) is not None:
                return fit
        fits = [fit for rows in sorted(lengths) if (fit := self._fit_of(below, rows)) is not None]
        if len(fits) > 1:
            unclear = [name for fit in fits for name, mode in fit.modes.items() if mode == "rows"]
            return _Fit(True, unclear=unclear or ["the batch"])
        return fits[0] if fits else None

    def _list_lengths(self, below: list[tuple[str, Any]]) -> set[int]:
        """The lengths of the outermost lists."""
        found: set[int] = set()
        for name, child in below:
            if is_sequence(child):
                found.add(len(child))
            elif (inner := children(child, name)) is not None:
                found |= self._list_lengths(inner)
        return found

    def _lengths(self, below: list[tuple[str, Any]]) -> set[int]:
        """The numbers of rows that a batch may have: the lengths of its tensors and of its lists."""
        found: set[int] = set()
        for name, child in below:
            if is_sequence(child):
                found.add(len(child))
                if self._known.get(name) == "rows":
                    continue
            inner = children(child, name)
            if inner is not None:
                found |= self._lengths(inner)
            elif (length := _leaf_rows(child)) is not None:
                found.add(length)
        return found

    def _fit_of(self, below: list[tuple[str, Any]], rows: int) -> _Fit | None:
        fit = self._together(below, rows)
        if fit is None or not fit.rows:
            return None
        fit.of = rows
        return fit

    def _fit(self, node: Any, name: str, rows: int) -> _Fit | None:
        if is_sequence(node):
            return self._fit_sequence(node, name, rows)
        below = children(node, name)
        if below is not None:
            return self._together(below, rows)
        length = _leaf_rows(node)
        if length is not None:
            return _Fit(True) if length == rows else None
        return _Fit(False) if _is_single(node) else None

    def _together(self, below: list[tuple[str, Any]], rows: int) -> _Fit | None:
        whole = _Fit(False)
        for name, child in below:
            fit = self._fit(child, name, rows)
            if fit is None:
                return None
            whole.rows = whole.rows or fit.rows
            whole.modes |= fit.modes
            whole.unclear += fit.unclear
        return whole

    def _fit_sequence(self, node: Any, name: str, rows: int) -> _Fit | None:
        one_a_row = _Fit(True, {name: "rows"})
        known = self._known.get(name)
        if known == "rows":
            return one_a_row if len(node) == rows else None
        columns = self._together(children(node, name) or [], rows)
        if columns is not None:
            columns.modes[name] = "columns"
        if known == "columns" or len(node) != rows or not _alike(node) or not self._may_be_rows(node):
            return columns
        if columns is None or self._lists == "rows" or _all_text(node):
            return one_a_row
        if self._lists == "columns":
            return columns
        if not columns.rows:  # numbers: the label of each row, or the height and width of all
            few = 1 < rows <= _MOST_ITEMS and _kind(node[0]) == "number"
            unclear = few and not self._records_are_rows
        elif any(_leaf_rows(each) is None for each in node):
            unclear = rows > 1 and not self._records_are_rows
        elif rows == 1:
            return columns
        else:
            unclear = True
        return _Fit(True, one_a_row.modes, [name] if unclear else [])

    def _may_be_rows(self, node: Any) -> bool:
        return self._lists != "columns" or _all_text(node)

    def _unclear(self, name: str, batch: Any = None) -> DataError:
        of = "" if batch is None else f" of {len(batch)} items"
        return DataError(
            f"{name}{of} may be a list of one item a row, or of columns that each have all rows; give rows as one "
            "tensor (torch.stack, or padded to one length), columns in a dict, or say which it is: "
            'strategy.distribute_dataset(data, lists="rows") or lists="columns"'
        )


def _loader_sizes(loader: DataLoader[Any]) -> list[int]:
    """The numbers of rows of a DataLoader's batches: the batch size, and the size of the last batch."""
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int) or loader.batch_sampler is None:
        return []
    examples = batches_in(getattr(loader.batch_sampler, "sampler", loader.sampler))
    if examples is None:
        return [size]
    return [each for each in (size if examples >= size else 0, examples % size) if each]


def _has_rows(below: list[tuple[str, Any]]) -> bool:
    """Whether there is a tensor or array with rows, in lists or not."""
    return any(_leaf_rows(child) is not None or _has_rows(children(child, name) or []) for name, child in below)


def _has_sequences(below: list[tuple[str, Any]] | None) -> bool:
    return any(is_sequence(child) or _has_sequences(children(child, name)) for name, child in below or ())


def _sequences(below: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, child in below:
        if is_sequence(child):
            yield name, child
        yield from _sequences(children(child, name) or [])


def _tensor_lengths(below: list[tuple[str, Any]]) -> set[int]:
    """The lengths of all tensors, in lists or not."""
    found: set[int] = set()
    for name, child in below:
        if (length := _leaf_rows(child)) is not None:
            found.add(length)
        found |= _tensor_lengths(children(child, name) or [])
    return found


def _marked(node: Any, below: list[tuple[str, Any]] | None, name: str, modes: Mapping[str, _Mode]) -> Any:
    if below is None:
        return node
    if modes.get(name) == "rows":
        return _as_rows(node)
    return rebuilt(node, [_marked(child, children(child, each), each, modes) for each, child in below])


def _as_rows(node: Any) -> Any:
    return RowList(node) if isinstance(node, list) else RowTuple(node)


def _anchors(below: list[tuple[str, Any]]) -> set[int]:
    """The lengths of the tensors outside of lists and tuples."""
    found: set[int] = set()
    for name, child in below:
        if is_sequence(child):
            continue
        inner = children(child, name)
        if inner is not None:
            found |= _anchors(inner)
        elif (length := _leaf_rows(child)) is not None:
            found.add(length)
    return found


def _leaf_rows(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) or leaf_has_rows(leaf):
        return rows_of(leaf)
    numpy = sys.modules.get("numpy")
    return len(leaf) if numpy and isinstance(leaf, numpy.ndarray) and leaf.ndim else None


def _is_single(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(leaf, (*SINGLE_VALUES, Tensor)) or (numpy is not None and isinstance(leaf, numpy.generic))


def _all_text(node: Any) -> bool:
    return bool(node) and all(isinstance(each, (str, bytes)) for each in node)


def _alike(items: Iterable[Any]) -> bool:
    """Whether all items are of one kind, as rows are."""
    return len({_kind(each) for each in items if each is not None and not (is_sequence(each) and not each)}) <= 1


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
