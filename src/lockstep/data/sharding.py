"""Divides a global batch into shards, which are views of the batch's tensors, or copies. Pure functions.

    8 rows, 3 replicas -> 3, 3, 2      4 rows, 3 replicas -> 2, 1, 1      2 rows, 3 replicas -> 1, 1, 0

Sizes differ by at most one and the larger shards come first, so that only a batch with fewer rows than replicas leaves
a shard empty. No row is dropped, padded or duplicated. ``has_rows`` lets a step find out that its shard is empty.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from lockstep.collectives.communicator import Communicator
from lockstep.collectives.per_replica import PartsOfExamples, PerReplica, select
from lockstep.data.batch_lists import SINGLE_VALUES, ListReader
from lockstep.data.ragged import RaggedLeaf, is_graph
from lockstep.data.structure import (
    check_layout,
    leaf_has_rows,
    map_leaves,
    named_leaves,
    replica_leaves,
    rows_of,
    take_rows,
)
from lockstep.data.typed_batches import Attributes
from lockstep.errors import DataError

_MOST_LEAVES_SHOWN = 8


def shard_sizes(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Returns the number of rows of each replica: balanced, the larger shards first."""
    rows_each, larger = divmod(rows, num_replicas)
    return tuple(rows_each + (replica < larger) for replica in range(num_replicas))


@dataclass(frozen=True, kw_only=True)
class LocalRows:
    """The rows of a batch that one worker's replicas get: from ``start`` on, so many each, in replica order."""

    start: int
    sizes: tuple[int, ...]


def local_rows(rows: int, workers: Communicator) -> LocalRows:
    """Divides ``rows`` rows among the replicas of all workers, and returns those of this worker's replicas."""
    sizes, first = shard_sizes(rows, workers.num_replicas), workers.first_replica
    return LocalRows(start=sum(sizes[:first]), sizes=sizes[first : first + workers.replicas[workers.index]])


def batch_rows(batch: Any, *, is_item: bool = False) -> int:
    """Returns the number of rows of a shard, or of a batch whose lists of rows are marked.

    ``is_item`` is as in ``map_leaves``.

    Raises DataError if leaves disagree in length, nothing has rows, or a leaf cannot be divided.
    """
    if (rows := _rows_of_tensors(batch)) is not None:
        return rows
    return _rows(map_leaves(as_tensor, batch, is_item=is_item), is_item=is_item)


def local_shards(batch: Any, cut: Callable[[int], LocalRows], list_reader: ListReader) -> Any:
    """Divides some rows of a batch among the local replicas. Returns the same structure with ``PerReplica`` leaves.

    Tensors and arrays are divided along dim 0 into views (an empty shard keeps dtype and trailing shape), and so are
    lists and tuples of one item a row; numbers, strings, None and tensors without a dimension go to every replica.
    ``cut`` returns the wanted rows, given the number of rows of the batch.

    Raises DataError if leaves disagree in length, nothing has rows, a list could be one of rows or one of columns, or a
    leaf cannot be divided.
    """
    columns = None if list_reader.division is not None else list_reader.tensors_of(batch)
    if columns is not None and (total := _common_rows(columns)) is not None:
        return _column_shards(batch, columns, cut(total), copies=list_reader.copies)
    tensors = _with_tensors(batch, list_reader)
    total = _rows(tensors, is_item=list_reader.is_item)
    rows = cut(total)

    def divide(_: str, leaf: Any) -> PerReplica[Any]:
        if not leaf_has_rows(leaf):
            return PerReplica([leaf] * len(rows.sizes))
        starts = accumulate(rows.sizes, initial=rows.start)
        return PerReplica(
            [
                take_rows(leaf, start, size, copies=list_reader.copies)
                for start, size in zip(starts, rows.sizes, strict=False)
            ]
        )

    def divide_attributes(attributes: Attributes | None) -> PerReplica[Any] | None:
        if attributes is None:
            return None
        if set(rows.sizes) != {total}:
            _check_columns(attributes, total)
        starts = accumulate(rows.sizes, initial=rows.start)
        return PerReplica(
            [attributes.part(start, size, total) for start, size in zip(starts, rows.sizes, strict=False)]
        )

    return _finished(map_leaves(divide, tensors, attributes=divide_attributes), list_reader)


def _with_tensors(batch: Any, list_reader: ListReader) -> Any:
    """The batch with its arrays as tensors, its lists of rows marked, and what is divided by example in leaves."""
    if list_reader.division is not None:
        batch = list_reader.division.mark(batch, partial(_rows_of_rest, list_reader))
    return map_leaves(as_tensor, list_reader.marked(batch), is_item=list_reader.is_item)


def _rows_of_rest(list_reader: ListReader, rest: Any) -> int:
    tensors = map_leaves(as_tensor, list_reader.marked(rest), is_item=list_reader.is_item)
    return _rows(tensors, is_item=list_reader.is_item)


def _finished(shards: Any, list_reader: ListReader) -> Any:
    """The shards with what the step gets of each replica's examples."""
    if list_reader.division is None:
        return shards

    def value(_: str, leaf: PerReplica[Any]) -> Any:
        if not isinstance(leaf[0], RaggedLeaf):
            return leaf
        joined = _joined([map_leaves(as_tensor, part.value) for part in leaf])
        joined = _copied(joined) if list_reader.copies else joined
        examples = [part.rows for part in leaf]
        return map_leaves(lambda _, values: PartsOfExamples(list(values), examples), joined)

    return map_leaves(value, shards)


def _common_rows(tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of rows of dense tensors, if all have the same; None where a look at each must tell what is wrong."""
    first = tensors[0]
    total = first.size(0) if first.ndim else None
    for tensor in tensors:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested  # ``is_plain``, for what is a tensor
        if not is_dense or not tensor.ndim or tensor.size(0) != total:
            return None
    return total


def _rows_of_tensors(batch: Any) -> int | None:
    """The number of rows of a tuple or list of tensors, and of dicts of tensors; None for any other batch."""
    if type(batch) is not tuple and type(batch) is not list:
        return None
    tensors: list[torch.Tensor] = []
    for node in batch:
        for leaf in node.values() if type(node) is dict else (node,):
            if type(leaf) is not torch.Tensor:
                return None
            tensors.append(leaf)
    return _common_rows(tensors) if tensors else None


def _column_shards(batch: Any, columns: Sequence[torch.Tensor], rows: LocalRows, *, copies: bool) -> Any:
    """Divides a tuple, list or dict of tensors: what ``local_shards`` does at a fifth of the time, 8 us a pair."""
    ranges = list(zip(accumulate(rows.sizes, initial=rows.start), rows.sizes, strict=False))
    shards = [
        PerReplica([take_rows(tensor, start, size, copies=copies) for start, size in ranges]) for tensor in columns
    ]
    if type(batch) is dict:
        return dict(zip(batch, shards, strict=True))
    return shards if type(batch) is list else tuple(shards)


def _check_columns(attributes: Attributes, rows: int) -> None:
    """Warns of attributes that seem to have the batch's rows, of which a replica has only some."""
    if names := attributes.columns(rows):
        warnings.warn(
            f"a batch of {rows} rows is a {attributes.kind} whose attributes {', '.join(names)} have {rows} rows too, "
            "and each replica gets all of them with its part of the rows; give what has a row for each example as an "
            f"item of the batch, such as batch[{names[0]!r}]",
            stacklevel=2,
        )


def split_batch(batch: Any, num_replicas: int, list_reader: ListReader | None = None) -> list[Any]:
    """Returns one batch per replica, with all rows divided among them."""

    def cut(rows: int) -> LocalRows:
        return LocalRows(start=0, sizes=shard_sizes(rows, num_replicas))

    whole = local_shards(batch, cut, list_reader or ListReader())
    return [select(whole, replica, num_replicas) for replica in range(num_replicas)]


def with_no_rows(batch: Any) -> Any:
    """Returns the batch with 0 rows: tensors keep dtype and trailing shape, other values stay."""
    return map_leaves(
        lambda _, leaf: take_rows(leaf, 0, 0) if leaf_has_rows(leaf) else leaf,
        batch,
        attributes=lambda attributes: attributes and attributes.part(0, 0),
    )


def join_batches(batches: Sequence[Any], num_replicas: int, list_reader: ListReader) -> Any:
    """Joins batches that are per-replica already, in replica order, to one structure with ``PerReplica`` leaves.

    If there are fewer than ``num_replicas``, the last replicas get an empty batch: the first one with 0 rows.

    Raises DataError if the structures differ, or a leaf cannot be given to a replica.
    """
    tensors = [map_leaves(as_tensor, list_reader.marked(batch), is_item=list_reader.is_item) for batch in batches]
    empty = with_no_rows(tensors[0])
    joined = _joined([*tensors, *[empty] * (num_replicas - len(tensors))])
    return _copied(joined) if list_reader.copies else joined


def join_shards(shards: Sequence[Any], empty: Sequence[bool], list_reader: ListReader) -> Any:
    """Joins shards that were loaded one by one, in replica order, to one structure with ``PerReplica`` leaves.

    ``empty`` says of each shard whether all its rows are left out.

    Raises DataError if the structures differ, or a shard's leaves disagree in length, have no rows or cannot be given
    to a replica.
    """
    tensors = [_with_tensors(shard, list_reader) for shard in shards]
    for shard in tensors:
        _rows(shard, is_item=list_reader.is_item)
    joined = _joined([with_no_rows(shard) if none else shard for shard, none in zip(tensors, empty, strict=True)])
    return _finished(_copied(joined) if list_reader.copies else joined, list_reader)


def _copied(joined: Any) -> Any:
    """The structure with copies of all tensors that have rows."""

    def copy(value: Any) -> Any:
        return value if (rows := rows_of(value)) is None else take_rows(value, 0, rows, copies=True)

    return map_leaves(lambda _, leaf: PerReplica([copy(value) for value in leaf]), joined)


def _joined(batches: Sequence[Any]) -> Any:
    flat = [named_leaves(batch) for batch in batches]
    names = [[name for name, _ in leaves] for leaves in flat]
    for replica, other in enumerate(names):
        if other != names[0]:
            raise DataError(
                f"replica {replica} got a batch of {_listed(other)}, replica 0 one of {_listed(names[0])}; "
                "give every replica the same structure"
            )
    columns = iter([PerReplica([leaf for _, leaf in column]) for column in zip(*flat, strict=True)])
    attributes = zip(*map(_attributes, batches), strict=True)

    def next_attributes(_: Attributes | None) -> PerReplica[Any] | None:
        values = next(attributes)
        return None if not any(values) else PerReplica([value or Attributes("", {}) for value in values])

    return map_leaves(lambda *_: next(columns), batches[0], attributes=next_attributes)


def _attributes(batch: Any) -> list[Attributes | None]:
    """The attributes of the batch objects in a batch, in the order of ``map_leaves``."""
    values: list[Attributes | None] = []

    def attributes_of(attributes: Attributes | None) -> Attributes | None:
        values.append(attributes)
        return attributes

    map_leaves(lambda _, leaf: leaf, batch, attributes=attributes_of)
    return values


def _rows(tensors: Any, *, is_item: bool) -> int:
    leaves = named_leaves(tensors, is_item=is_item)
    lengths = {name: rows for name, leaf in leaves if (rows := rows_of(leaf)) is not None}
    if not lengths:
        texts = [f"{name}: {type(leaf).__name__}" for name, leaf in leaves]
        raise DataError(
            f"a batch of {_listed(texts)} has no rows to divide; expected tensors with the examples along dim 0: "
            "batch the data with a DataLoader, and give a Hugging Face dataset torch format and .batch(size)"
        )
    if len(set(lengths.values())) > 1:
        texts = [f"{name}: {rows} rows" for name, rows in lengths.items()]
        raise DataError(
            f"the tensors of a batch disagree in length: {_listed(texts)}; give all the same number of rows (dim 0), a "
            'value for the whole batch as a 0-dim tensor, and lists with lists="rows" as many items as there are rows; '
            "where an example has several rows or flat entries (boxes with an index, packed tokens, pairs), say so by "
            "distribute_dataset(batches, divide=ls.divide.by_index(...)), by_boundaries, in_groups or others of "
            "ls.divide"
        )
    return next(iter(lengths.values()))


def as_tensor(name: str, leaf: Any) -> Any:
    """The tensor of an array; another value that a batch may hold stays. Raises DataError for anything else."""
    # A batch can only have an array if numpy has been imported; this package does not need it.
    numpy = sys.modules.get("numpy")
    if isinstance(leaf, torch.Tensor):
        check_layout(name, leaf)
        return leaf
    if leaf_has_rows(leaf) or isinstance(leaf, SINGLE_VALUES) or (numpy and isinstance(leaf, numpy.generic)):
        return leaf
    if not numpy or not isinstance(leaf, numpy.ndarray):
        raise DataError(
            f"{name} is a {type(leaf).__name__}, which cannot be divided among replicas; give tensors, arrays or "
            "single values in tuples, lists and dicts, or a list of one such object a row (see DataLoader's collate_fn)"
            f"{_about(leaf)}"
        )
    try:
        # torch shares an array's memory, but warns about read-only memory and refuses negative strides.
        shareable = leaf.flags.writeable and min(leaf.strides, default=0) >= 0
        return torch.as_tensor(leaf if shareable else leaf.copy())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} is an array of dtype {leaf.dtype}, which no tensor can hold; convert it, or leave it out"
        ) from error


def _about(leaf: Any) -> str:
    if is_graph(leaf):
        return "; one graph is not divided: give a Batch of several, as torch_geometric.loader.DataLoader makes it"
    return ", or say how it is divided with distribute_dataset(batches, divide=ls.divide.by_examples(split, join))"


def _listed(items: Sequence[str]) -> str:
    text = ", ".join(items[:_MOST_LEAVES_SHOWN]) or "nothing"
    more = len(items) - _MOST_LEAVES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def has_rows(batch: Any) -> bool:
    """Whether a replica's shard has rows: none of a batch that has fewer rows than there are replicas.

    A step whose module cannot take 0 rows runs its forward and backward pass only where there are some. A replica that
    leaves them out adds zeros; ``optimizer.step()`` and other collectives belong in every replica, and
    ``compute_average_loss`` without ``global_batch_size`` is one.

    Args:
        batch: what the step got: a tensor, or tensors, arrays and lists of rows in tuples, lists and dicts.

    Raises:
        DataError: nothing in it has rows.

    Example:
        >>> import torch, lockstep as ls
        >>> ls.has_rows((torch.zeros(0, 3), torch.zeros(0)))
        False
    """
    rows = [number for leaf in replica_leaves(batch) if (number := rows_of(leaf)) is not None]
    if not rows:
        raise DataError(
            f"has_rows got a {type(batch).__name__} in which nothing has rows; give the batch as the step gets it, or "
            "a tensor of it"
        )
    return any(rows)
