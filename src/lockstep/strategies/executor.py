"""What each kind of strategy supplies: its devices and workers, and a way to execute one body per replica.

Abstract. ``base.py`` builds on it what every strategy offers; ``threaded.py`` and ``default.py`` supply it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lockstep.collectives.communicator import Workers
from lockstep.config import LogicalDevice
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.replicas.rng.mode import Guard
from lockstep.replicas.rng.state import ReplicaGenerators


class Executor(ABC):
    """Where the replicas of a strategy run, and how."""

    @property
    @abstractmethod
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The logical devices of the local replicas, in replica order."""

    @property
    @abstractmethod
    def workers(self) -> Workers:
        """The workers that run this strategy's replicas, as this one sees them."""

    @property
    @abstractmethod
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of the local replicas stand, for checkpoints."""

    @abstractmethod
    def _execute(
        self, fn: Callable[..., Any], bodies: Sequence[Callable[[], Any]], rows: Sequence[int | None]
    ) -> list[Any]:
        """Runs one body per replica, each in its replica context, and returns their results."""

    @abstractmethod
    def _guard_steps(self, guards: Sequence[Guard]) -> None:
        """Has the replicas' calls of torch functions looked at, each by its guard; where there are several."""

    @abstractmethod
    def trial(self) -> AbstractContextManager[None]:
        """Opens a block whose runs leave the replicas' random numbers, and the peaks of their memory, as they were."""

    @abstractmethod
    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """What the local replicas' GPUs, or shares of them, have of memory now, and the most they had, in bytes.

        In replica order; those on a CPU have no memory of their own and are left out. It looks at every block of
        torch's allocator, which takes a millisecond or more. Outside replicas only.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what the strategy keeps running. Idempotent; afterwards ``run`` is an error."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas, of all workers, share each global batch."""
        return self.workers.num_replicas
