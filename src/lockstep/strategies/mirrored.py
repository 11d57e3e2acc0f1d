"""MirroredStrategy: one process, one replica per logical device, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.cluster.resolve import declared_job
from lockstep.collectives.communication import check_waiting_time
from lockstep.collectives.workers import OneWorker, Workers
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.generators import ReplicaGenerators
from lockstep.replicas.observer import current_observer
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import Strategy

DEFAULT_TIMEOUT_S = 1800.0


class MirroredStrategy(Strategy):
    """Trains one model on many devices of this host as if on one; no launcher.

    The numbers are those of one device on the whole global batch, for any number of replicas; the same program with
    the same seed on the same devices gives bit-equal weights.

    Args:
        devices: a list of devices such as ``["cpu:0", "cpu:1"]`` or ``["gpu:0", "gpu:2"]``; None is every logical GPU,
            else every logical CPU device.
        seed: of the replicas' random numbers (dropout); None is ``torch.initial_seed()``.
        timeout_s: how many seconds a replica waits in a collective for one that is still computing.

    Raises:
        ConfigError: an unknown device, or one named twice.
        UsageError: the environment declares a job of several workers.
        ClusterError: the environment declares a job in a form that cannot be followed.

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = ls.Model(torch.nn.Linear(4, 1))
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device | LogicalDevice] | None = None,
        *,
        seed: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__()
        if isinstance(devices, str):
            raise ConfigError(f"devices is a list, got the string {devices!r}; write devices=[{devices!r}]")
        check_waiting_time("timeout_s", timeout_s)
        job = declared_job()
        if job is not None:
            raise UsageError(
                f"{job.source} declares a job of {job.workers} workers, and MirroredStrategy would train one model in "
                "each of them; use MultiWorkerMirroredStrategy, or start one process without those variables"
            )
        self._devices = observed(resolve_devices(devices))
        self._workers = OneWorker(len(self._devices))
        self._runner = ReplicaRunner(
            self._devices, seed=torch.initial_seed() if seed is None else seed, timeout_s=timeout_s
        )

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The logical devices of the replicas, in replica order."""
        return self._devices

    @property
    def workers(self) -> Workers:
        """This process alone."""
        return self._workers

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of the local replicas stand, for checkpoints."""
        return self._runner.generators

    def trial(self) -> AbstractContextManager[None]:
        """Opens a block whose runs leave the replicas' random numbers, and their accounts of memory, as they were."""
        return self._runner.trial()

    def close(self) -> None:
        """Ends the replica threads. They also end when the strategy is garbage collected and at interpreter exit."""
        self._runner.close()

    def _execute(
        self, fn: Callable[..., Any], bodies: Sequence[Callable[[], Any]], rows: Sequence[int | None]
    ) -> list[Any]:
        return self._runner.run(self, fn, bodies, rows)

    def __repr__(self) -> str:
        return f"MirroredStrategy([{', '.join(device.name for device in self._devices)}])"


def observed(devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
    """The devices that an observer wants in place of these; without one, these."""
    observer = current_observer()
    return devices if observer is None else observer.devices_chosen(devices)
