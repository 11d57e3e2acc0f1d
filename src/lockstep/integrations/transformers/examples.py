"""Batches whose rows are not one an example: pairs of answers, flattened texts, the images of several examples.

    examples a b c  -> collator ->  rows  a+ b+ c+ a- b- c-      "blocks": replica 0 gets a+ b+ a- b-
                                    rows  a1 a2 b1 b2 c1 c2      "interleaved": a1 a2 b1 b2
                                    one row  aaaabbccc           none of these: replica 0's examples collated again

Which it is shows when the examples of each replica are collated by themselves: if that gives rows of the whole batch,
but for padding, the rows of the whole batch are taken, which are padded as on one device. A batch with one row an
example is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.data.random_state import random_state, set_random_state
from lockstep.data.sharding import shard_sizes
from lockstep.errors import DataError

RowOrder = Literal["blocks", "interleaved"]
_ORDERS: tuple[RowOrder, ...] = ("blocks", "interleaved")
_KEY = "lockstep_division"


@dataclass(frozen=True, kw_only=True, eq=False)
class Division:
    """How a collated batch is divided by example.

    Attributes:
        examples: the number of examples of the batch.
        parts: the inputs of every replica, of all workers; None for one without an example.
        order: how rows belong to examples; None if each replica's examples were collated by themselves.
        is_flat: whether each part is one row, and the whole batch is these behind each other.
    """

    examples: int
    parts: Sequence[Mapping[str, Any] | None]
    order: RowOrder | None
    is_flat: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of examples of the replicas."""
        return shard_sizes(self.examples, len(self.parts))


def count_examples(loader: Any, replicas: int) -> None:
    """Has a DataLoader, or one that accelerate has prepared, divide batches by example where rows are something else.

    It sets the loader's ``collate_fn``, for one replica too: checkpoints name what is in it by its place, which must be
    the same on any number of replicas. Other loaders, and those that make no batches, stay as they are.
    """
    base = getattr(loader, "base_dataloader", loader)
    collator = getattr(base, "collate_fn", None)
    batches = isinstance(base, DataLoader) and base.batch_sampler is not None
    if collator is not None and batches and not (isinstance(collator, partial) and collator.func is _collated):
        base.collate_fn = partial(_collated, collator, replicas, _Expansion())


def division_of(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Division | None]:
    """Returns a batch as the collator made it, and how it is divided; None where a row is an example."""
    if _KEY not in batch:
        return batch, None
    inputs = dict(batch)
    return inputs, inputs.pop(_KEY, None)


def halves(inputs: Mapping[str, Any], examples: int, order: RowOrder) -> list[dict[str, Any]]:
    """The two halves of a replica's inputs, by example."""
    middle = shard_sizes(examples, 2)[0]
    return [_rows_of_examples(inputs, examples, order, *half) for half in ((0, middle), (middle, examples))]


@dataclass(eq=False)
class _Expansion:
    """The order of rows in the batches so far, in this process."""

    orders: set[RowOrder] = field(default_factory=set)


def _collated(collator: Callable[[Any], Any], replicas: int, expansion: _Expansion, examples: Any) -> Any:
    """The batch of some examples, with its division if rows are not examples."""
    batch = collator(examples)
    number = len(examples)
    if replicas == 1 or not isinstance(batch, Mapping) or all(size == number for size in row_counts(batch)):
        return batch
    division = _divided(collator, batch, examples, replicas, expansion)
    return batch if division is None else {**batch, _KEY: division}


def _divided(
    collator: Callable[[Any], Any], batch: Mapping[str, Any], examples: Any, replicas: int, expansion: _Expansion
) -> Division | None:
    """How a batch is divided; None if its tensors disagree in length in a way that no example explains."""
    number = len(examples)
    places = list(pairwise(accumulate(shard_sizes(number, replicas), initial=0)))
    if expansion.orders and all(size % number == 0 for size in row_counts(batch)):
        (order,) = expansion.orders
        parts = [_rows_of_examples(batch, number, order, *place) for place in places]
        return Division(examples=number, parts=parts, order=order)
    collated = _collated_alone(collator, examples, places, max(row_counts(batch)))
    fitting: list[RowOrder] = [order for order in _ORDERS if _fits(batch, collated, number, places, order)]
    if not fitting:
        is_flat = _is_flat(batch, collated)
        if is_flat or _adds_up(batch, [part for part in collated if part is not None]):
            return Division(examples=number, parts=collated, order=None, is_flat=is_flat)
        if len(set(row_counts(batch))) > 1:
            return None
        raise DataError(
            f"data_collator made {max(row_counts(batch))} rows of {number} examples, and other rows of the examples "
            "of each replica alone, so that the batch cannot be divided by example; have it make the same rows of an "
            "example whatever the others are, or use one replica"
        )
    parts = [_rows_of_examples(batch, number, fitting[0], *place) for place in places]
    if len(fitting) == 1:
        expansion.orders.add(fitting[0])
    return Division(examples=number, parts=parts, order=fitting[0])


def _collated_alone(
    collator: Callable[[Any], Any], examples: Any, places: Sequence[tuple[int, int]], rows: int
) -> list[Mapping[str, Any] | None]:
    """The examples of each replica, collated by themselves; what this draws is drawn again by what comes next."""
    # The examples are collated once more than on one device; a collator that draws must not draw more for it.
    state = random_state(None)
    try:
        return [collator(examples[start:stop]) if stop > start else None for start, stop in places]
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"data_collator made {rows} rows of {len(examples)} examples, and failed for the examples of one replica "
            f"alone ({type(error).__name__}: {error}), so that the batch cannot be divided by example; have it take "
            "any number of examples, or use one replica"
        ) from error
    finally:
        set_random_state(None, state)


def row_counts(batch: Mapping[str, Any]) -> list[int]:
    """The lengths of the tensors in a batch."""
    lengths = []
    for value in batch.values():
        if isinstance(value, Mapping):
            lengths += row_counts(value)
        elif isinstance(value, Tensor) and value.ndim:
            lengths.append(len(value))
    return lengths


def _rows_of_examples(batch: Mapping[str, Any], number: int, order: RowOrder, start: int, stop: int) -> dict[str, Any]:
    """The rows of some of a batch's ``number`` examples."""

    def rows_of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rows_of(item) for key, item in value.items()}
        if not ((isinstance(value, Tensor) and value.ndim) or isinstance(value, list)) or len(value) % number:
            return value
        times = len(value) // number
        if times == 1 or order == "interleaved":
            return value[start * times : stop * times]
        blocks = [slice(block * number + start, block * number + stop) for block in range(times)]
        if isinstance(value, Tensor):
            return torch.cat([value[block] for block in blocks])
        return [item for block in blocks for item in value[block]]

    return {key: rows_of(value) for key, value in batch.items() if key != _KEY}


def _fits(
    batch: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any] | None],
    number: int,
    places: Sequence[tuple[int, int]],
    order: RowOrder,
) -> bool:
    """Whether the parts have the rows of the batch in this order, but for padding."""
    if any(size % number for size in row_counts(batch)):
        return False
    pairs = [(_rows_of_examples(batch, number, order, *place), part) for place, part in zip(places, parts, strict=True)]
    return all(part is None or _is_padded(rows, part) for rows, part in pairs)


def _is_padded(rows: Any, part: Any) -> bool:
    """Whether ``rows`` is ``part``, or has more columns on one side of it."""
    if isinstance(rows, Mapping) and isinstance(part, Mapping):
        return all(key in rows and _is_padded(rows[key], value) for key, value in part.items())
    if not isinstance(rows, Tensor) or not isinstance(part, Tensor):
        return type(rows) is type(part) and bool(rows == part)
    if rows.ndim != part.ndim or rows.shape[:1] != part.shape[:1] or rows.dtype != part.dtype:
        return False
    wider = [(size, length) for size, length in zip(rows.shape, part.shape, strict=True)]
    if any(length > size for size, length in wider):
        return False
    on_right = rows[tuple(slice(length) for _, length in wider)]
    on_left = rows[tuple(slice(size - length, size) for size, length in wider)]
    return torch.equal(on_right, part) or torch.equal(on_left, part)


def _adds_up(batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the parts have as many rows as the batch, in each of their tensors."""
    counts = [row_counts(part) for part in parts]
    whole = row_counts(batch)
    return (
        all(len(count) == len(whole) for count in counts) and [sum(rows) for rows in zip(*counts, strict=True)] == whole
    )


def _is_flat(batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether parts of one row, behind each other, are the batch of one row, in its tensors of tokens."""
    rows = [part for part in parts if part is not None]
    wide = {key: value for key, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1}
    wide = {key: value for key, value in wide.items() if len(value) == 1}
    return bool(wide) and all(
        all(isinstance(part.get(key), Tensor) and len(part[key]) == 1 for part in rows)
        and _continues(value, [part[key] for part in rows])
        for key, value in wide.items()
    )


def _continues(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts, behind each other, are the whole, but that each may count from 0 (DataCollator's seq_idx)."""
    widths = [part.shape[1] for part in parts]
    if sum(widths) != whole.shape[1]:
        return False
    pieces = zip(torch.split(whole, widths, dim=1), parts, strict=True)
    return all(piece.shape == part.shape and _is_shifted(piece, part) for piece, part in pieces)


def _is_shifted(piece: Tensor, part: Tensor) -> bool:
    if torch.equal(piece, part) or piece.is_floating_point() or piece.dtype == torch.bool:
        return torch.equal(piece, part)
    return bool((piece - part == (piece - part).flatten()[:1]).all())


def joined(values: Sequence[Tensor], sizes: Sequence[int], division: Division | None) -> Tensor:
    """Joins an output of the replicas, in the order of the whole batch; ``sizes`` are their numbers of examples.

    Raises DataError if that order is not known.
    """
    if division is not None and division.is_flat and all(value.ndim > 1 and len(value) == 1 for value in values):
        return torch.cat(list(values), dim=1)
    one_each = all(len(value) == size for value, size in zip(values, sizes, strict=True))
    if division is None or one_each or division.order == "interleaved":
        return torch.cat(list(values))
    if division.order == "blocks":
        columns = zip(*(torch.split(value, size) for value, size in zip(values, sizes, strict=True)), strict=True)
        return torch.cat([block for column in columns for block in column])
    raise DataError(
        f"the model returns {sum(map(len, values))} rows for {sum(sizes)} examples, in an order that the batch does "
        "not show; have data_collator give one row an example, or evaluate with prediction_loss_only=True"
    )
