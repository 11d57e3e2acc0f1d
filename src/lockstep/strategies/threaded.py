"""What strategies have in common whose local replicas are threads of this process, in one worker or in many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lockstep.collectives.communicator import Workers, caller
from lockstep.config import LogicalDevice
from lockstep.mirroring.exchange import LocalExchange
from lockstep.mirroring.holding import Holding
from lockstep.mirroring.optimizer import MakeExchange
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.replicas.hooks import current_observer
from lockstep.replicas.rng.mode import Guard
from lockstep.replicas.rng.state import ReplicaGenerators
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import Strategy


class ThreadedStrategy(Strategy):
    """One replica per logical device, each in its own thread. Abstract: a strategy says how these come about.

    Args:
        devices: of the local replicas, in replica order.
        workers: all workers, as this one sees them.
        runner: the replicas' threads.
        make_exchange: how an optimizer's gradients are summed.
        holding: what of a model this worker holds; None is all of it.
        guard: what each body is run in, in its replica's thread.
    """

    def __init__(
        self,
        devices: tuple[LogicalDevice, ...],
        workers: Workers,
        runner: ReplicaRunner,
        make_exchange: MakeExchange = LocalExchange,
        *,
        holding: Holding | None = None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(make_exchange, holding)
        self._guard = guard
        self._devices = devices
        self._workers = workers
        self._runner = runner

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The logical devices of the local replicas, in replica order."""
        return self._devices

    @property
    def workers(self) -> Workers:
        """The workers that run this strategy's replicas, as this one sees them."""
        return self._workers

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of the local replicas stand, for checkpoints."""
        return self._runner.generators

    def trial(self) -> AbstractContextManager[None]:
        """Opens a block whose runs leave the replicas' random numbers, and the peaks of their memory, as they were."""
        return self._runner.trial()

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """What the local replicas' GPUs, or shares of them, have of memory now, and the most they had, in bytes."""
        self._outside("device_memory")
        return self._runner.device_memory()

    def close(self) -> None:
        """Ends the replica threads and, among several workers, leaves the job; the others may go on alone.

        The threads also end when the strategy is garbage collected and at interpreter exit.
        """
        self._runner.close()
        self._workers.close()

    def _guard_steps(self, guards: Sequence[Guard]) -> None:
        self._runner.guard(guards)

    def _execute(
        self, fn: Callable[..., Any], bodies: Sequence[Callable[[], Any]], rows: Sequence[int | None]
    ) -> list[Any]:
        if not self._workers.alone:
            self._workers.doing(f"a run of {getattr(fn, '__qualname__', type(fn).__qualname__)} ({caller()})")
        return self._runner.run(self, fn, [partial(_guarded, self._guard, body) for body in bodies], rows)


def _guarded(guard: Callable[[], AbstractContextManager[None]], body: Callable[[], Any]) -> Any:
    with guard():
        return body()


def observed(devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
    """The devices that an observer wants in place of these; without one, these."""
    observer = current_observer()
    return devices if observer is None else observer.devices_chosen(devices)
