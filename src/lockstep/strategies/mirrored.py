"""MirroredStrategy: one process, with one replica for each logical device, each in its own thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.cluster.environment import declared_job
from lockstep.collectives.communicator import SingleWorkerCommunicator, check_waiting_time
from lockstep.config import LogicalDevice
from lockstep.errors import UsageError
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import ThreadedStrategy, chosen_devices


class MirroredStrategy(ThreadedStrategy):
    """Trains one model on many devices of this host as if on one; no launcher.

    The same program with the same seed on the same devices gives bit-equal weights.

    Args:
        devices: a list of devices such as ``["cpu:0", "cpu:1"]`` or ``["gpu:0", "gpu:2"]``; None is every logical GPU,
            else every logical CPU device.
        seed: of the replicas' random numbers (dropout); None is ``torch.initial_seed()``.
        timeout_s: how many seconds a replica waits in a collective for one that is still computing.

    Raises:
        ConfigError: an unknown device, or one named twice.
        UsageError: the environment declares a job of several workers.
        ClusterError: the environment declares a job in a form that cannot be followed.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device | LogicalDevice] | None = None,
        *,
        seed: int | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        check_waiting_time("timeout_s", timeout_s)
        job = declared_job()
        if job is not None:
            raise UsageError(
                f"{job.source} declares a job of {job.num_workers} workers, and MirroredStrategy would train one model "
                "in each of them; use MultiWorkerMirroredStrategy, or start one process without those variables"
            )
        chosen = chosen_devices(devices)
        runner = ReplicaRunner(chosen, seed=torch.initial_seed() if seed is None else seed, timeout_s=timeout_s)
        super().__init__(chosen, SingleWorkerCommunicator(len(chosen)), runner)

    def __repr__(self) -> str:
        return f"MirroredStrategy([{', '.join(device.name for device in self.devices)}])"
