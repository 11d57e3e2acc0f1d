"""Distributed datasets: any iterable of batches, seen as structures with one value per replica, on its device.

``DistributedDataset`` divides global batches; ``PerReplicaDataset`` takes batches that a function made per replica.
Both can be iterated many times, and both read ahead. What the data is, and its order, stay the source's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.config import LogicalDevice
from lockstep.data.input_context import InputContext
from lockstep.data.position import RandomState, begin_again, passing_over, random_state
from lockstep.data.prefetch import PASSED_OVER, ClosableIterator, read_ahead
from lockstep.data.shards import join_batches, per_replica_batch
from lockstep.data.transfer import Transfer
from lockstep.errors import DataError


class DistributedDataset:
    """Global batches, each divided among the replicas: ceil(rows / replicas) each until none are left.

    Args:
        dataset: any iterable of global batches: a DataLoader, a list, a Hugging Face dataset in torch format whose
            items are batches. Iterated anew for each iteration of this object.
        devices: the replicas' devices, in replica order.
        prefetch: how many batches to read ahead; 0 reads in the caller's thread.

    Example:
        >>> import lockstep as ls, torch
        >>> strategy = ls.MirroredStrategy(["cpu:0"])
        >>> [batch.values for batch in strategy.distribute_dataset([torch.arange(2)])]
        [(tensor([0, 1]),)]
    """

    def __init__(self, dataset: Iterable[Any], devices: Sequence[LogicalDevice], *, prefetch: int = 2) -> None:
        self._dataset = _checked(dataset)
        self._devices = tuple(devices)
        self._prefetch = prefetch

    def __iter__(self) -> ClosableIterator[Any]:
        return self.iterate()

    def iterate(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration that goes on where another one stopped.

        The global batches before that place are read once more, unless the data can go there without, so that all
        that the data draws comes out as if they had been taken.

        Args:
            skip: how many global batches to pass over.
            random: what ``random_state()`` gave when that iteration began, or None to begin with the generators as
                they are. torch's default generator is put back when the iteration has begun: it is the caller's.

        Raises:
            DataError: the data holds other generators than ``random`` is about.
        """
        transfer, replicas = Transfer(self._devices), len(self._devices)
        begun = begin_again(self._dataset, random)
        # iter() here and now, in the caller's thread: what it draws from torch's generator comes in program order.
        source = passing_over(skip, iter(self._dataset))
        placed = (batch if batch is PASSED_OVER else transfer(per_replica_batch(batch, replicas)) for batch in source)
        return read_ahead(placed, self._prefetch, begun=begun)

    def random_state(self) -> RandomState:
        """The states of all generators that the data may draw from, now; for ``iterate``."""
        return random_state(self._dataset)

    def __len__(self) -> int:
        return _length(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tells the data's sampler, where it shuffles by epoch, which one comes next."""
        _set_epoch(self._dataset, epoch)


class PerReplicaDataset:
    """Batches that are per-replica already, taken in order: replica 0 gets the first, replica 1 the second, and so on.

    Where the source ends in the middle of a round the remaining replicas get an empty batch.

    Args:
        fn: called once, with this worker's ``InputContext``; returns an iterable of per-replica batches.
        devices: the replicas' devices, in replica order.
        prefetch: how many rounds to read ahead; 0 reads in the caller's thread.
    """

    def __init__(
        self, fn: Callable[[InputContext], Iterable[Any]], devices: Sequence[LogicalDevice], *, prefetch: int = 2
    ) -> None:
        self._devices = tuple(devices)
        self._dataset = _checked(fn(InputContext(num_replicas_in_sync=len(self._devices))))
        self._prefetch = prefetch

    def __iter__(self) -> ClosableIterator[Any]:
        return self.iterate()

    def iterate(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration that goes on where another one stopped; see ``DistributedDataset.iterate``.

        Args:
            skip: how many rounds to pass over.
            random: what ``random_state()`` gave when that iteration began, or None.
        """
        transfer, replicas = Transfer(self._devices), len(self._devices)
        begun = begin_again(self._dataset, random)
        rounds = passing_over(skip, _rounds(iter(self._dataset), replicas))
        placed = (
            batches if batches is PASSED_OVER else transfer(join_batches(batches, replicas)) for batches in rounds
        )
        return read_ahead(placed, self._prefetch, begun=begun)

    def random_state(self) -> RandomState:
        """The states of all generators that the data may draw from, now; for ``iterate``."""
        return random_state(self._dataset)

    def __len__(self) -> int:
        return math.ceil(_length(self._dataset) / len(self._devices))

    def set_epoch(self, epoch: int) -> None:
        """Tells the data's sampler, where it shuffles by epoch, which one comes next."""
        _set_epoch(self._dataset, epoch)


@runtime_checkable
class _ShufflesByEpoch(Protocol):
    def set_epoch(self, epoch: int, /) -> None: ...


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


def _checked(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, (DistributedDataset, PerReplicaDataset)):
        raise DataError("received a dataset that is distributed already; distribute the original once")
    if isinstance(dataset, (torch.Tensor, Mapping, str, bytes)):
        raise DataError(
            f"received a {type(dataset).__name__}, expected an iterable of global batches; "
            "give a DataLoader, or a list of batches"
        )
    if not isinstance(dataset, (_Indexed, Iterable)):
        raise DataError(
            f"received a {type(dataset).__name__}, which cannot be iterated; give an iterable of global batches such "
            "as a DataLoader"
        )
    return dataset  # type: ignore[return-value]  # what has __getitem__ alone is iterable too, by Python's old protocol


def _length(dataset: Iterable[Any]) -> int:
    if not isinstance(dataset, Sized):
        raise TypeError(f"the number of batches is unknown: {type(dataset).__name__} has no len()")
    return len(dataset)


def _set_epoch(dataset: Iterable[Any], epoch: int) -> None:
    parts: list[Any] = [dataset]
    if isinstance(dataset, DataLoader):
        parts += [dataset.sampler, dataset.batch_sampler, dataset.dataset]
    for part in {id(part): part for part in parts}.values():
        if isinstance(part, _ShufflesByEpoch):
            part.set_epoch(epoch)


def _rounds(source: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batches := list(islice(source, size)):
        yield batches
