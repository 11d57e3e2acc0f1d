"""What distributed datasets have in common once it is settled how their batches come about: they are iterated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.data.passes import Passes
from lockstep.data.position import RandomState
from lockstep.data.prefetch import ClosableIterator


class Distributed:
    """Batches on the replicas, any number of times. Abstract: each kind says of which source, and how it is read.

    Args:
        passes: begins the iterations.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def __iter__(self) -> ClosableIterator[Any]:
        return self._passes.begin()

    def iterate(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration that goes on where another one stopped.

        The batches before that place are read once more, unless the data can go there without, so that all that the
        data draws comes out as if they had been taken.

        Args:
            skip: how many global batches, or rounds of per-replica ones, to pass over.
            random: what ``random_state()`` gave when that iteration began, or None to begin with the generators as
                they are. torch's default generator is put back when the iteration has begun: it is the caller's.

        Raises:
            DataError: the data holds other generators than ``random`` is about.
        """
        return self._passes.begin(skip=skip, random=random)

    def random_state(self) -> RandomState:
        """The states of all generators that the data may draw from, now; for ``iterate``."""
        return self._passes.random_state()

    def __len__(self) -> int:
        return self._passes.length()

    def set_epoch(self, epoch: int) -> None:
        """Tells the data's sampler, where it shuffles by epoch, which one comes next."""
        dataset = self._passes.dataset
        parts: list[Any] = [dataset]
        if isinstance(dataset, DataLoader):
            parts += [dataset.sampler, dataset.batch_sampler, dataset.dataset]
        for part in {id(part): part for part in parts}.values():
            if isinstance(part, _ShufflesByEpoch):
                part.set_epoch(epoch)


@runtime_checkable
class _ShufflesByEpoch(Protocol):
    def set_epoch(self, epoch: int, /) -> None: ...
