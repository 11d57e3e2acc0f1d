"""MultiWorkerMirroredStrategy: many processes, on one host or many, each with its local replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.cluster.resolve import cluster_from_environment
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.options import CommunicationOptions, check_waiting_time
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.errors import ConfigError
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.job import Job
from lockstep.strategies.own_gpus import own_devices
from lockstep.strategies.threaded import ThreadedStrategy, observed

START_TIMEOUT_S = 600.0


class MultiWorkerMirroredStrategy(ThreadedStrategy):
    """Trains one model on the devices of many workers as if on one.

    Every worker is a process that runs the same program; this constructor waits until all are there. The numbers are
    those of one device on the whole global batch, for any number of workers and replicas. A worker that fails, stops or
    cannot be reached ends the job on all others with an error that names it. Close the strategy at the end: until then,
    or the end of the process, this worker is in the job.

    Args:
        devices: this worker's devices; None is every logical GPU, or its part of them where its launcher shows all
            workers of a host the same ones; else every logical CPU device. Each worker's own number of them may differ.
        cluster: who takes part; None is what the environment says: TF_CONFIG, torchrun's variables or SLURM's. Without
            any, this process is the only worker.
        seed: of the replicas' random numbers, the same on every worker; None is the chief's ``torch.initial_seed()``.
        timeout_s: how many seconds to wait for all workers at the start.
        communication: how they talk to each other afterwards.

    Raises:
        ConfigError: an unknown device, or one named twice; a number that cannot be.
        ClusterError: a malformed cluster; workers that did not come; workers that disagree.

    Example:
        >>> import lockstep as ls
        >>> strategy = ls.MultiWorkerMirroredStrategy()
        >>> strategy.workers.size
        1
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device | LogicalDevice] | None = None,
        *,
        cluster: ClusterSpec | None = None,
        seed: int | None = None,
        timeout_s: float = START_TIMEOUT_S,
        communication: CommunicationOptions | None = None,
    ) -> None:
        if isinstance(devices, str):
            raise ConfigError(f"devices is a list, got the string {devices!r}; write devices=[{devices!r}]")
        check_waiting_time("timeout_s", timeout_s)
        self.communication = communication or CommunicationOptions()
        self.cluster = cluster if cluster is not None else cluster_from_environment()
        chosen = observed(resolve_devices(own_devices(self.cluster) if devices is None else devices))
        job = Job(self.cluster, chosen, timeout_s=timeout_s, options=self.communication)
        runner = ReplicaRunner(
            chosen,
            seed=job.agree(seed),
            timeout_s=self.communication.timeout_s,
            first_replica=job.workers.first_replica,
            failing=job.fail,
        )
        job.when_over(runner.abort)
        super().__init__(chosen, job.workers, runner, job.make_exchange)

    def __repr__(self) -> str:
        names = ", ".join(device.name for device in self.devices)
        return f"MultiWorkerMirroredStrategy([{names}], worker {self.workers.index} of {self.workers.size})"
