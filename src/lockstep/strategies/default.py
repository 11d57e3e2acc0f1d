"""The strategy outside every scope: one device, in the caller's own thread, with torch's own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any

from lockstep.collectives.communicator import OneWorker, Workers
from lockstep.collectives.replica_barrier import Rendezvous, Turns
from lockstep.config import LogicalDevice, list_logical_devices, resolve_devices
from lockstep.replicas.context import ReplicaContext, in_context
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.replicas.rng.mode import Guard
from lockstep.replicas.rng.state import ReplicaGenerators
from lockstep.strategies.base import Strategy
from lockstep.strategies.scope import current_strategy


class DefaultStrategy(Strategy):
    """One replica on the first logical GPU, else the first logical CPU device. No thread: a plain torch program."""

    @cached_property
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The one device; chosen, and taken into use, when it is first asked for."""
        return resolve_devices([(list_logical_devices("GPU") or list_logical_devices("CPU"))[0]])

    @cached_property
    def workers(self) -> Workers:
        """This process alone."""
        return OneWorker(1)

    @cached_property
    def generators(self) -> ReplicaGenerators:
        """The one replica draws from torch's own generators."""
        return ReplicaGenerators([], [], [])

    def trial(self) -> AbstractContextManager[None]:
        """There is nothing of its own to keep: the random numbers are torch's."""
        return nullcontext()

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """What this process has of its GPU: a plain torch program keeps no accounts."""
        device = self.devices[0]
        driver = driver_of(device)
        if driver is None:
            return ()
        has = driver.whole(device.torch_device)
        return (
            DeviceMemory(name=device.name, limit=None, in_use=has.in_use, reserved=has.reserved, peak=has.reserved),
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _guard_steps(self, guards: Sequence[Guard]) -> None:
        """There is one replica."""

    def _execute(
        self, fn: Callable[..., Any], bodies: Sequence[Callable[[], Any]], rows: Sequence[int | None]
    ) -> list[Any]:
        device = self.devices[0]
        context = ReplicaContext(self, 0, device, Rendezvous([f"replica 0 ({device.name})"], timeout_s=1.0), Turns(1))
        with in_context(context):
            return [bodies[0]()]

    def __repr__(self) -> str:
        return "the default strategy of one device"


@cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy whose scope or replica this code is in; outside, the default one of one device."""
    return current_strategy() or _default()
