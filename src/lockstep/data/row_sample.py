"""A few rows of a map-style dataset, as each worker has them, to find workers that read another copy of the data.

    choose_keys       the first, middle and last row and a few others, equal on all workers
    describe_row      types, shapes and a digest of a row; of numbers that may be rounded, two numbers
    compare_rows      the first difference between workers

A dataset may draw a row anew each time it is read. Rows are therefore read again where they differ, and only a row that
comes out the same on every reading of each worker, and another one on different workers, is a difference of the data.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.data.ragged import tensors_of
from lockstep.data.structure import is_plain, named_leaves
from lockstep.errors import ClusterError
from lockstep.replicas.rng.generators import derived_seed

ROWS = 8
READINGS = 8
_MOST_ELEMENTS = 2**16
_ODD = 0x9E3779B97F4A7C15 - 2**64
_LARGE = 1e6  # in the place of an infinite number
# Relative to the norm of a tensor. Processors round the last bits of what a row computes in other ways; decoders of
# other versions give pictures whose values differ by 1 of 255.
_ROUNDED, _DECODED = 1e-5, 1e-2
_EXACT = (bool, int, bytes, type(None))

Leaf = tuple[str, float, float]
"""What must be equal, then a projection and the norm of numbers that need not be so to the last bit."""
RowDescription = list[Leaf]


Readings = list[RowDescription]
"""One row, as often as it was read."""


class RowSample(NamedTuple):
    """Rows to read: their keys in the dataset, a seed for each, and how often to read each."""

    keys: list[Any]
    seeds: list[int]
    readings: int = 1

    def again(self, places: Sequence[int]) -> RowSample:
        """Those rows, to be read often enough to tell a row that is drawn anew from one that is not."""
        return RowSample([self.keys[place] for place in places], [self.seeds[place] for place in places], READINGS)


class SampledRows(NamedTuple):
    """Rows that one worker has read, and a digest of their keys."""

    sample: RowSample
    digest: int
    descriptions: list[RowDescription]


def choose_rows(loader: DataLoader[Any], batch: Sequence[Any], seed: int) -> RowSample:
    """The rows that a worker reads, with seeds that are equal on all workers."""
    keys = choose_keys(loader, batch, seed)
    return RowSample(keys, [derived_seed(seed, place) for place in range(len(keys))])


def has_known_keys(loader: DataLoader[Any]) -> bool:
    """Whether the keys of all rows are known without a batch of the sampler."""
    return _keys_of(loader) is not None


def choose_keys(loader: DataLoader[Any], batch: Sequence[Any], seed: int) -> list[Any]:
    """The keys of a few rows: of all that the sampler may give where that is known, else of its first ``batch``."""
    all_keys = _keys_of(loader)
    keys: Sequence[Any] = batch if all_keys is None else all_keys
    if not len(keys):
        return []
    # A generator of its own: which rows are compared must not change what the training draws.
    drawn = torch.randint(len(keys), (ROWS - 3,), generator=torch.Generator().manual_seed(seed)).tolist()
    places = dict.fromkeys([0, len(keys) - 1, len(keys) // 2, *drawn])
    return [keys[place] for place in places]


def _keys_of(loader: DataLoader[Any]) -> Sequence[Any] | None:
    """All keys of rows that a DataLoader's sampler may give; None if it is not one of torch's own."""
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    if type(sampler) in (SequentialSampler, RandomSampler):
        return range(len(loader.dataset))  # type: ignore[arg-type]
    return list(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else None


def describe_row(row: Any) -> RowDescription:
    """What of a row is compared: tensors, arrays, pictures, texts and numbers; of other objects their type."""
    leaves: RowDescription = []
    digest = 0
    for name, leaf in _leaves_of_row(row):
        numbers = _numbers(leaf)
        if numbers is None:
            digest = zlib.crc32(f"{name}:{_text(leaf)}".encode(errors="backslashreplace"), digest)
        else:
            shape = f"{name}: {numbers.dtype} {tuple(numbers.shape)}"
            leaves.append((shape, *_projected(numbers)) if _is_rounded(numbers) else (_digested(shape, numbers), 0, 0))
    return [(f"{digest:08x}", 0.0, 0.0), *leaves]


def _leaves_of_row(row: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a row with their names; of graphs and packed sequences also the tensors in them."""
    for name, leaf in named_leaves(row, name="row"):
        yield name, leaf
        yield from ((f"{name}: tensor {number}", part) for number, part in enumerate(tensors_of(leaf)))


def _numbers(leaf: Any) -> Tensor | None:
    """The tensor of a leaf; None if it has none."""
    if isinstance(leaf, Tensor):
        return leaf.detach() if is_plain(leaf) and not (leaf.is_meta or leaf.is_quantized) else None
    if type(leaf) is float:
        return torch.tensor(leaf, dtype=torch.float64)
    numpy, pictures = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if numpy is not None and pictures is not None and isinstance(leaf, pictures.Image):
        leaf = numpy.asarray(leaf)
    if numpy is None or not isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(leaf)
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biuf" and array.dtype.isnative else None


def _is_rounded(numbers: Tensor) -> bool:
    return numbers.is_floating_point() or numbers.is_complex() or (numbers.dtype is torch.uint8 and numbers.dim() > 1)


def _sampled(numbers: Tensor) -> Tensor:
    """The elements of a tensor, evenly spread ones of a large tensor, on the CPU."""
    flat = numbers.reshape(-1)
    return flat[:: math.ceil(len(flat) / _MOST_ELEMENTS)].cpu() if len(flat) > _MOST_ELEMENTS else flat.cpu()


def _digested(shape: str, numbers: Tensor) -> str:
    data = _sampled(numbers).contiguous().view(torch.uint8).long()
    weights = torch.arange(1, len(data) + 1) * _ODD  # int64 wraps round, on every machine alike
    return f"{shape} {int((data * weights).sum())}"


def _projected(numbers: Tensor) -> tuple[float, float]:
    """The sum of the elements with fixed weights between -1 and 1, and the norm."""
    flat = _sampled(torch.view_as_real(numbers) if numbers.is_complex() else numbers).double()
    # A NaN would make every difference a NaN, which is above no bound, so the row would pass as equal.
    flat = flat.nan_to_num(0.0, posinf=_LARGE, neginf=-_LARGE)
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64).mul_(2.399963).cos_()  # the golden angle
    return float(flat @ weights), float(flat.norm())


def _text(leaf: Any) -> str:
    """The text of a value that is the same in every process; of a path its name, as folders may differ by host."""
    if type(leaf) is str:
        return PurePath(leaf).name if leaf.startswith("/") else leaf
    return repr(leaf) if type(leaf) in _EXACT else type(leaf).__qualname__


def difference(row: RowDescription, other: RowDescription) -> float:
    """How far two rows are apart, relative to the norms of their tensors; infinite if what must be equal is not."""
    if [text for text, _, _ in row] != [text for text, _, _ in other]:
        return math.inf
    pairs = zip(row, other, strict=True)
    return max(max(abs(one[1] - two[1]), abs(one[2] - two[2])) / (max(one[2], two[2]) or 1.0) for one, two in pairs)


def compare_rows(workers: Communicator, rows: SampledRows, read: Callable[[RowSample], list[Readings]]) -> str:
    """A warning if rows differ a little between workers; empty if they do not. Every worker must call it.

    Args:
        workers: those that read the same data.
        rows: this worker's rows.
        read: reads rows again.

    Raises:
        ClusterError: a worker has another row than the chief.
    """
    gathered = all_gather_object(workers, "a few rows of the data", [rows.digest, rows.descriptions])
    if any(digest != rows.digest for digest, _ in gathered):
        return ""  # the order of the data is the fault, which the next exchange tells
    by_worker = [descriptions for _, descriptions in gathered]
    places = [
        place
        for place, row in enumerate(by_worker[0])
        if any(difference(row, other[place]) > _ROUNDED for other in by_worker)
    ]
    if not places:
        return ""
    readings = read(rows.sample.again(places))
    drawn = [
        any(difference(rows.descriptions[place], reading) > _ROUNDED for reading in again)
        for place, again in zip(places, readings, strict=True)
    ]
    drawn_anywhere = map(any, zip(*all_gather_object(workers, "rows that were read again", drawn), strict=True))
    constant = [place for place, is_drawn in zip(places, drawn_anywhere, strict=True) if not is_drawn]
    return _complaint(workers, rows.sample, by_worker, constant) if constant else ""


def _complaint(
    workers: Communicator, sample: RowSample, rows: Sequence[Sequence[RowDescription]], places: Sequence[int]
) -> str:
    """Raises a ClusterError, or returns a warning, about rows that each worker reads always alike, and that differ."""
    differences = [
        (difference(rows[0][place], row[place]), worker, place) for place in places for worker, row in enumerate(rows)
    ]
    farthest, worker, place = max(differences, default=(0.0, 0, 0))
    if farthest <= _ROUNDED:
        return ""
    what = (
        f"the workers' data differ: {workers.names[worker]} has another row {sample.keys[place]!r} than "
        f"{workers.names[0]}, and {len(places)} of {len(sample.keys)} rows that were compared differ"
    )
    if farthest > _DECODED:
        raise ClusterError(
            f'{what}; give every worker the same copy of the data, or distribute its own with shard="off"'
        )
    return f"{what}, by {farthest:.1g} of their size; install the same versions of what reads them on all hosts"
