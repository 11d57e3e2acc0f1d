"""MultiWorkerMirroredStrategy: many processes on one host or many, each with local replicas.

``own_devices`` chooses a worker's devices where the program names none. ``WorkerJob`` is this process's part in the
job: it joins, agrees with the others on how to train, and makes communicators and gradient exchanges.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.cluster.environment import cluster_from_environment
from lockstep.cluster.local import core_info, divide_cores, own_local_rank
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator, check_agreement
from lockstep.collectives.distributed import DistributedCommunicator
from lockstep.collectives.options import CommunicationOptions, check_waiting_time
from lockstep.config import LogicalDevice, list_logical_devices, list_physical_devices, resolve_devices
from lockstep.errors import ClusterError, ConfigError, LockstepError, NonFiniteLossError
from lockstep.membership.membership import Membership, join
from lockstep.mirroring.gradients.buckets import BucketExchange, GradientMarks
from lockstep.mirroring.gradients.exchange import Copies, GradientExchange, LocalExchange
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import ThreadedStrategy, observed


def own_devices(cluster: ClusterSpec | None) -> tuple[LogicalDevice, ...]:
    """This worker's part of the GPUs that it sees, divided or not; without any, the CPU's logical devices.

    Args:
        cluster: who takes part; None is this process alone, which takes all.

    Raises:
        ClusterError: the launcher's variables are malformed.
    """
    gpus = list_physical_devices("GPU")
    if not gpus:
        return tuple(list_logical_devices("CPU"))
    own = {gpus[number].name for number in own_local_rank(cluster).own_gpus(len(gpus))}
    return tuple(device for device in list_logical_devices("GPU") if device.physical.name in own)


def each_has_its_own(gpus: Sequence[int]) -> bool:
    """Whether every worker has a GPU, and no two the same one, as NCCL wants it.

    Args:
        gpus: a number for the GPU of each worker; 0 where it has a CPU.
    """
    return all(gpus) and len(set(gpus)) == len(gpus)


def check_gpus(names: Sequence[str], gpus: Sequence[int]) -> None:
    """Holds the workers of a divided model to a GPU each, or to none.

    Args:
        names: how the workers are called in messages.
        gpus: as for ``each_has_its_own``.

    Raises:
        ClusterError: some have a GPU and others none, or two have the same one.
    """
    if not any(gpus) or each_has_its_own(gpus):
        return
    if not all(gpus):
        with_one = next(name for name, gpu in zip(names, gpus, strict=True) if gpu)
        raise ClusterError(
            f"{with_one} has a GPU and {names[gpus.index(0)]} a CPU, and the workers that divide a model have devices "
            "of one kind; name one with device= on every worker"
        )
    second = next(worker for worker, gpu in enumerate(gpus) if gpu in gpus[:worker])
    different = len(set(gpus))
    raise ClusterError(
        f"{len(gpus)} workers have {different} GPU{'s' * (different != 1)}, and NCCL takes one worker per GPU: "
        f"{names[gpus.index(gpus[second])]} and {names[second]} have the same one; start {different}, or show each "
        "worker a GPU of its own, as lockstep run does"
    )


class WorkerJob:
    """Waits until all workers are there. Every worker must make one.

    Args:
        cluster: who takes part; None is this process alone.
        devices: this worker's.
        timeout_s: how many seconds to wait for all.
        options: how the workers talk to each other.

    Raises:
        ClusterError: workers that did not come, or disagree.
    """

    def __init__(
        self,
        cluster: ClusterSpec | None,
        devices: Sequence[LogicalDevice],
        *,
        timeout_s: float,
        options: CommunicationOptions,
    ) -> None:
        self._options = options
        self._devices = tuple(devices)
        self._optimizers = 0
        self._membership: Membership | None = None
        self._gpus: tuple[int, ...] = ()
        self.workers: Communicator = SingleWorkerCommunicator(len(devices))
        if cluster is not None and cluster.task == "worker" and cluster.num_workers > 1:
            info = {"replicas": len(devices), "gpu": _gpu_id(devices[0].torch_device), **core_info()}
            self._membership = join(cluster, timeout_s=timeout_s, lost_after_s=options.lost_after_s, info=info)
            divide_cores(self._membership.infos, cluster.index)
            self._gpus = tuple(info["gpu"] for info in self._membership.infos)
            self.workers = DistributedCommunicator(
                self._membership,
                [info["replicas"] for info in self._membership.infos],
                nccl=self._nccl,
                timeout_s=options.timeout_s,
            )

    @property
    def _nccl(self) -> bool:
        """Whether tensors on GPUs go between workers by NCCL; else through host memory."""
        return each_has_its_own(self._gpus) and torch.distributed.is_nccl_available()

    def check_gpus(self) -> None:
        """For workers that divide a model: each has a GPU of its own, or none has one. Every worker must call it.

        Raises:
            ClusterError: it is not so; on every worker.
        """
        with self._ending():
            check_gpus(self.workers.names, self._gpus)

    def agree(self, seed: int | None, settings: Sequence[str] = ()) -> int:
        """The seed of all workers; and all go on from the chief's random numbers, so that all shuffle alike.

        Args:
            seed: that this one was given.
            settings: whatever else must be equal, a line each.

        Raises:
            ClusterError: the workers were given different seeds or options.
        """
        with self._ending():
            check_agreement(self.workers, "the seed", [f"seed={seed}"])
            check_agreement(self.workers, "the settings of the strategy", [repr(self._options), *settings])
            chiefs = self.workers.all_gather_bytes("the chief's seed", str(torch.initial_seed()).encode())[0]
            state = torch.default_generator.get_state()
            self.workers.broadcast("the chief's random numbers", [state])
        if self.workers.size > 1:
            torch.default_generator.set_state(state)
        return int(chiefs) if seed is None else seed

    def group(self, name: str, members: Sequence[int]) -> Communicator:
        """Some of the workers, among them this one, as if they were all. Every one of them must ask for it.

        Args:
            name: what the group is called; no worker is in two of one name.
            members: their numbers, ascending.
        """
        if not isinstance(self.workers, DistributedCommunicator) or len(members) == 1:
            return SingleWorkerCommunicator(1)
        return DistributedCommunicator(
            self.workers.membership,
            [1] * len(members),
            nccl=self._nccl,
            timeout_s=self._options.timeout_s,
            members=members,
            team=name,
        )

    def fail(self, error: BaseException) -> None:
        """Tells the others that this worker ends with ``error``."""
        # A loss that is not finite all workers raise together, and may go on together.
        if self._membership is not None and not isinstance(error, NonFiniteLossError):
            self._membership.report_failure(error)

    def when_over(self, stop: Callable[[BaseException], None]) -> None:
        """Has ``stop`` called once, from another thread, when another worker has ended the job."""
        if self._membership is not None:
            self._membership.subscribe(stop)

    def make_exchange(
        self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]], group: Communicator | None = None
    ) -> GradientExchange:
        """How the gradients of an optimizer over ``parameters`` are summed. Every worker must ask for it.

        Args:
            parameters: per parameter its local copies.
            groups: the local replicas by storage.
            group: the workers over which to sum; None is all.
        """
        workers = self.workers if group is None else group
        if not isinstance(workers, DistributedCommunicator):
            return LocalExchange(parameters, groups)
        self._optimizers += 1
        return BucketExchange(
            parameters,
            [group[0] for group in groups],
            workers=workers,
            bucket_bytes=self._options.bucket_bytes,
            stream=workers.new_group(f"gradients of optimizer {self._optimizers}", parameters[0][0].device),
            travel_as=self._options.travel_as,
            marks=GradientMarks(self._devices),
        )

    def make_sharing(
        self, parameters: Sequence[Copies], group: Communicator, kinds: Sequence[Hashable]
    ) -> ShardingGroup | None:
        """The workers of a group as those who share the state of an optimizer; None where there is one.

        Every one of them must ask for it, right after its ``make_exchange``.

        Args:
            parameters: per parameter its local copies, of which there is one.
            group: they hold the same weights.
            kinds: per parameter, what it is like: parameters of one kind are divided by themselves.
        """
        if not isinstance(group, DistributedCommunicator):
            return None
        name = f"shares of optimizer {self._optimizers}"
        return ShardingGroup(
            workers=group,
            stream=group.new_group(name, parameters[0][0].device),
            window_bytes=self._options.bucket_bytes,
            kinds=kinds,
        )

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Leaves the job, and tells the others, where what all of them look at does not fit."""
        try:
            yield
        except LockstepError as error:
            self.fail(error)
            self.workers.close()
            raise


def _gpu_id(device: torch.device) -> int:
    """A number for the GPU in this host; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) or 1


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
        job = WorkerJob(self.cluster, chosen, timeout_s=timeout_s, options=self.communication)
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
