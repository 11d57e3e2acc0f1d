"""Iterations over one source, from its reader to the consumer.

meeting.begin -> reader.begin -> transfer -> read ahead -> meeting.hand_out -> transfer.received -> consumer
consumer's thread ------------   reading thread ---------  consumer's thread
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.config import LogicalDevice
from lockstep.data.meeting import Meeting
from lockstep.data.position import STARTED, RandomState, begin_again, random_state
from lockstep.data.prefetch import DEPTH, ClosableIterator, checked_depth, read_ahead
from lockstep.data.readers import Reader
from lockstep.data.skipping import read_ahead_unasked
from lockstep.data.source_random import default_state, set_default_state, watched_generators
from lockstep.data.transfer import Transfer


def _depth(reader: Reader) -> int:
    return DEPTH if read_ahead_unasked(reader.dataset) else 0


class Passes:
    """Begins iterations; any number of them, also at once.

    Args:
        reader: reads this worker's part of the source.
        meeting: what is said between the workers meanwhile.
        devices: the local replicas' devices, in replica order.
        prefetch: how many batches to read ahead; 0 reads in the caller's thread. None is 2 for a source that may be,
            as long as it does not draw random numbers.

    Raises:
        ConfigError: ``prefetch`` is no number of batches.
    """

    def __init__(
        self, reader: Reader, meeting: Meeting, devices: Sequence[LogicalDevice], *, prefetch: int | None
    ) -> None:
        self._reader = reader
        self._meeting = meeting
        self._devices = tuple(devices)
        self._told = prefetch is not None
        self._prefetch = checked_depth(prefetch) if prefetch is not None else _depth(reader)

    @property
    def dataset(self) -> Iterable[Any]:
        """The source, or this worker's part of it."""
        return self._reader.dataset

    def begin(self, *, skip: int = 0, random: Mapping[str, Tensor] | None = None) -> ClosableIterator[Any]:
        """An iteration without its first ``skip`` batches; see ``DistributedDataset.iterate``."""
        transfer = Transfer(self._devices)
        if random is not None and STARTED in random:
            callers = default_state()
            self._reader.start()
            set_default_state(callers)
        begun = begin_again(self.dataset, random)
        self._meeting.begin(self._reader)
        # Begun here and now, in the caller's thread: what it draws from torch's generator comes in program order.
        source = self._reader.begin(skip, transfer)
        watched = watched_generators(self.dataset, default=not self._told)
        ahead = read_ahead(source, self._prefetch, begun=begun, others=watched, skip=skip)
        return transfer.received(self._meeting.hand_out(ahead, transfer))

    def random_state(self) -> RandomState:
        """The states of all generators that the source may draw from, now."""
        state = random_state(self.dataset)
        return {**state, STARTED: torch.ones(())} if self._reader.started else state

    def length(self) -> int:
        """The number of batches of an iteration.

        Raises:
            TypeError: it is unknown.
        """
        known = self._meeting.length(self._reader)
        if known is None:
            raise TypeError(f"the number of batches is unknown: {type(self.dataset).__name__} has no len()")
        return known
