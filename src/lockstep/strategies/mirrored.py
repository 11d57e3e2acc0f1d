"""MirroredStrategy: one process with a thread for each replica, one replica on each device or as many as asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep import tensorflow_names
from lockstep.checks import check_number, check_seconds
from lockstep.cluster.environment import declared_cluster
from lockstep.cluster.launcher_variables import ALONE
from lockstep.cluster.spec import ClusterSpec, Task
from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.config import LogicalDevice
from lockstep.errors import ClusterError, UsageError
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import ThreadedStrategy, check_replicas, describe_devices, select_devices

MULTI_WORKER = "MultiWorkerMirroredStrategy"


class MirroredStrategy(ThreadedStrategy):
    """Trains one model on many devices of this host as if on one; no launcher.

    The same program with the same seed on the same devices gives bit-equal weights. With ``replicas`` it does so on any
    number of devices of one kind.

    Args:
        devices: a list of devices such as ``["cpu:0", "cpu:1"]`` or ``["gpu:0", "gpu:2"]``; None is every logical GPU,
            else every logical CPU device.
        replicas: the number of replicas, laid on the devices in blocks; None is one replica for each device.
        seed: of the replicas' random numbers (dropout); None is ``torch.initial_seed()``.
        timeout_s: how many seconds a replica waits in a collective for one that is still computing.
        threads_per_replica: the intra-op threads of each replica on a CPU; None divides the cores, or is 1 with
            ``replicas``: torch's last bits depend on it.

    Raises:
        ConfigError: an unknown device, or one named twice; a number that is not positive.
        UsageError: the environment declares a job of several workers.
        ClusterError: the environment declares a job in a form that cannot be followed.
    """

    @tensorflow_names.advise(tensorflow_names.ARGUMENTS)
    def __init__(
        self,
        devices: Sequence[str | torch.device | LogicalDevice] | None = None,
        *,
        replicas: int | None = None,
        seed: int | None = None,
        timeout_s: float = 1800.0,
        threads_per_replica: int | None = None,
    ) -> None:
        threads = check_replicas(replicas, threads_per_replica)
        check_seconds("timeout_s", timeout_s)
        check_number("seed", seed, whole=True)
        cluster = _declared_cluster()
        task: Task = "worker" if cluster is None else cluster.task
        if cluster is not None and task == "worker" and cluster.num_workers > 1:
            raise UsageError(
                f"{cluster.source} declares a job of {cluster.num_workers} workers, and MirroredStrategy would train "
                "one model in each of them; use MultiWorkerMirroredStrategy, or start one process without those "
                f"variables; {ALONE}"
            )
        replica_devices = select_devices(devices, replicas)
        seed = torch.initial_seed() if seed is None else seed
        runner = ReplicaRunner(replica_devices, seed=seed, timeout_s=timeout_s, threads=threads)
        workers = SingleWorkerCommunicator(len(replica_devices), any_layout=replicas is not None, task=task)
        super().__init__(replica_devices, workers, runner)

    def __repr__(self) -> str:
        return f"MirroredStrategy({describe_devices(self)})"


def _declared_cluster() -> ClusterSpec | None:
    """The cluster that the environment declares. Raises ClusterError, which names the strategy for several workers."""
    try:
        return declared_cluster()
    except ClusterError as error:
        if MULTI_WORKER in str(error):
            raise
        raise ClusterError(f"{error}; MirroredStrategy is for one process, and {MULTI_WORKER} for several") from None
