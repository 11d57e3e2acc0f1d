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
from typing import Any, Literal, NamedTuple, get_args

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
_Children = list[tuple[str, Any]]

SINGLE_VALUES = (bool, int, float, complex, str, bytes, type(None))
"""Types of values without rows, which every replica gets unchanged."""
_MOST_ITEMS = 3
"""The length of (x, y, sample_weight)."""


@dataclass
class _Interpretation:
    """What the parts of a batch are, if it has some number of rows."""

    rows: bool  # whether anything has rows
    modes: dict[str, _Mode] = field(default_factory=dict)  # what each list is, by name
    unclear: list[str] = field(default_factory=list)  # the names of lists that could hold rows or columns
    of: int | None = None  # the number of rows, for a whole batch


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
        """Returns the batch with its lists and tuples of rows, ``rows`` many if known, as RowList and RowTuple.

        Raises DataError if a list could hold rows or columns.
        """
        below = root_children(batch)
        if below is None:
            return batch
        sizes = self._sizes if rows is None else (rows,)
        if is_sequence(batch) and self._root_is_rows(batch, below, sizes):
            return _as_rows(batch)
        if not any(is_sequence(node.value) for node in _walk(below)):
            return batch
        result = self._interpret_root(below, sizes)
        if result is None:
            self._check_known(below)
            return batch  # the tensors disagree in length, which dividing the batch reports
        if result.unclear:
            raise self._unclear(result.unclear[0])
        self._known.update(result.modes)
        return _marked(batch, below, "batch", result.modes)

    def _check_known(self, below: _Children) -> None:
        """Refuses a list that had one item a row before, and now has another number of items than there are rows."""
        nodes = list(_walk(below))
        lengths = {node.rows for node in nodes if node.rows is not None}
        lists = [node for node in nodes if is_sequence(node.value) and self._known.get(node.name) == "rows"]
        for name, value, _ in lists if len(lengths) == 1 else ():
            if len(value) not in lengths:
                raise DataError(
                    f"{name} had one item a row in the batches before, and has {len(value)} items in one of "
                    f"{next(iter(lengths))} rows; give as many as there are rows, and leave a value that is one for "
                    "all rows out of the batch, or give it as a dict"
                )

    def _root_is_rows(self, batch: Any, below: _Children, sizes: Sequence[int]) -> bool:
        if self._items:
            return False
        if self._lists != "auto":
            return isinstance(batch, list) if self._lists == "rows" else _all_text(batch)
        if "batch" in self._known:
            return self._known["batch"] == "rows"
        for size in (*sizes, None):
            rows, columns = self._root_may_be(batch, below, size)
            if rows and columns:
                raise self._unclear("the batch", batch)
            if rows or columns:
                self._known["batch"] = "rows" if rows else "columns"
                return rows
        return False

    def _root_may_be(self, batch: Any, below: _Children, size: int | None) -> tuple[bool, bool]:
        """Whether a batch of ``size`` rows that is a list or tuple may hold rows, and whether it may hold columns."""
        result = self._interpret_root(below, () if size is None else (size,))
        columns = result is not None and (size is None or result.of == size)
        if not _alike(batch) or all(isinstance(each, SINGLE_VALUES) for each in batch):
            return size is not None and len(batch) == size and _alike(batch), columns
        if size is not None:
            return len(batch) == size and not (size == 1 and columns), columns
        long = (isinstance(batch, list) and self._keeps_tuples) or len(batch) > _MOST_ITEMS
        return columns and len(batch) > 1 and long, columns

    def _interpret_root(self, below: _Children, sizes: Sequence[int]) -> _Interpretation | None:
        """Interprets a batch whose root is structure, from the children of the root; None if it has no rows so.

        ``sizes`` are the numbers of rows that the batch may have, the likeliest first; empty if unknown.
        """
        nodes = list(_walk(below))
        lengths = {node.rows for node in nodes if node.rows is not None and not node.in_list}
        if len(lengths) > 1:
            return None
        if not lengths and not sizes and self._lists != "rows" and not any(node.rows is not None for node in nodes):
            return None  # a single example has lists, too
        if not lengths and self._lists == "rows":
            lengths = {len(node.value) for node in nodes if is_sequence(node.value) and not node.in_list}
        elif not lengths:
            closed = frozenset(name for name, mode in self._known.items() if mode == "rows")
            found = (len(n.value) if is_sequence(n.value) else n.rows for n in _walk(below, closed=closed))
            lengths = {length for length in found if length is not None}
        for size in sizes:
            if size in lengths and (result := self._interpret_for(below, size)) is not None:
                return result
        results = [result for rows in sorted(lengths) if (result := self._interpret_for(below, rows)) is not None]
        if len(results) > 1:
            unclear = [name for result in results for name, mode in result.modes.items() if mode == "rows"]
            return _Interpretation(True, unclear=unclear or ["the batch"])
        return results[0] if results else None

    def _interpret_for(self, below: _Children, rows: int) -> _Interpretation | None:
        result = self._interpret_all(below, rows)
        if result is None or not result.rows:
            return None
        result.of = rows
        return result

    def _interpret_all(self, below: _Children, rows: int) -> _Interpretation | None:
        whole = _Interpretation(False)
        for name, child in below:
            result = self._interpret(child, name, rows)
            if result is None:
                return None
            whole.rows = whole.rows or result.rows
            whole.modes |= result.modes
            whole.unclear += result.unclear
        return whole

    def _interpret(self, node: Any, name: str, rows: int) -> _Interpretation | None:
        if is_sequence(node):
            return self._interpret_sequence(node, name, rows)
        below = children(node, name)
        if below is not None:
            return self._interpret_all(below, rows)
        length = _leaf_rows(node)
        if length is not None:
            return _Interpretation(True) if length == rows else None
        numpy = sys.modules.get("numpy")
        is_single = isinstance(node, (*SINGLE_VALUES, Tensor)) or (numpy and isinstance(node, numpy.generic))
        return _Interpretation(False) if is_single else None

    def _interpret_sequence(self, node: Any, name: str, rows: int) -> _Interpretation | None:
        one_a_row = _Interpretation(True, {name: "rows"})
        known = self._known.get(name)
        if known == "rows":
            return one_a_row if len(node) == rows else None
        columns = self._interpret_all(children(node, name) or [], rows)
        if columns is not None:
            columns.modes[name] = "columns"
        may_be_rows = self._lists != "columns" or _all_text(node)
        if known == "columns" or len(node) != rows or not _alike(node) or not may_be_rows:
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
        return _Interpretation(True, one_a_row.modes, [name] if unclear else [])

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


class _Node(NamedTuple):
    """A leaf, list, tuple or mapping of a batch; ``in_list``: inside of a list or tuple below the root."""

    name: str
    value: Any
    in_list: bool

    @property
    def rows(self) -> int | None:
        """The number of rows of a leaf."""
        return _leaf_rows(self.value)


def _walk(below: _Children, *, in_list: bool = False, closed: frozenset[str] = frozenset()) -> Iterator[_Node]:
    """Yields all nodes below the root of a batch, but none inside of those whose names are in ``closed``."""
    for name, child in below:
        yield _Node(name, child, in_list)
        if name not in closed:
            yield from _walk(children(child, name) or [], in_list=in_list or is_sequence(child), closed=closed)


def _marked(node: Any, below: _Children | None, name: str, modes: Mapping[str, _Mode]) -> Any:
    if below is None:
        return node
    if modes.get(name) == "rows":
        return _as_rows(node)
    return rebuilt(node, [_marked(child, children(child, each), each, modes) for each, child in below])


def _as_rows(node: Any) -> Any:
    return RowList(node) if isinstance(node, list) else RowTuple(node)


def _leaf_rows(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor) or leaf_has_rows(leaf):
        return rows_of(leaf)
    numpy = sys.modules.get("numpy")
    return len(leaf) if numpy and isinstance(leaf, numpy.ndarray) and leaf.ndim else None


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
