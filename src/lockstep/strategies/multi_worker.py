"""MultiWorkerMirroredStrategy: many processes on one host or many, each with local replicas.

``WorkerJob`` joins the job, agrees with the others on how to train, and makes communicators and gradient exchanges.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch

from lockstep import tensorflow_names
from lockstep.checks import check_kind, check_number, check_seconds
from lockstep.cluster.environment import cluster_from_environment
from lockstep.cluster.local import core_info, divide_cores, own_local_rank
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communicator import (
    CommunicationOptions,
    Communicator,
    SingleWorkerCommunicator,
    check_agreement,
)
from lockstep.collectives.distributed import DistributedCommunicator
from lockstep.config import LogicalDevice, default_devices, list_logical_devices, list_physical_devices
from lockstep.errors import ClusterError, ConfigError, LockstepError, NonFiniteLossError
from lockstep.membership.membership import Membership, join
from lockstep.membership.started_group import cluster_with_group, started_group
from lockstep.mirroring.gradients.bucketed_all_reduce import BucketExchange, GradientMarks
from lockstep.mirroring.gradients.local_sum import Copies, GradientExchange, LocalExchange
from lockstep.mirroring.zero1 import ShardingGroup
from lockstep.replicas.conditions import Conditions, conditions_of, joined
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import ThreadedStrategy, check_replicas, describe_devices, place_replicas, select_devices

_LOG = logging.getLogger("lockstep")
START_TIMEOUT_S = 600.0


def worker_devices(cluster: ClusterSpec | None) -> tuple[LogicalDevice, ...]:
    """This worker's part of the GPUs that it sees; without any, the CPU's logical devices. No ``cluster``: all."""
    gpus = list_physical_devices("GPU")
    if not gpus:
        return default_devices()
    names = {gpus[number].name for number in own_local_rank(cluster).own_gpus(len(gpus))}
    return tuple(device for device in list_logical_devices("GPU") if device.physical.name in names)


def cluster_of_process(declared: ClusterSpec | None) -> ClusterSpec | None:
    """The cluster of a strategy that was given ``declared``: that one, or what variables or torch's group say.

    Raises ClusterError if they contradict each other. Who declares a single worker trains alone in any group.
    """
    if declared is not None and declared.num_workers == 1:
        return declared
    return cluster_with_group(cluster_from_environment() if declared is None else declared, started_group())


def has_separate_gpus(gpus: Sequence[int]) -> bool:
    """Whether every worker has a GPU of its own, as NCCL needs; ``gpus`` are their numbers, 0 for a CPU."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def check_gpus(names: Sequence[str], gpus: Sequence[int]) -> None:
    """Raises ClusterError unless the workers of a divided model, of these names, have a GPU each, or none."""
    if not any(gpus) or has_separate_gpus(gpus):
        return
    alike = [name for name, gpu in zip(names, gpus, strict=True) if not gpu or gpus.count(gpu) > 1]
    different = len({*gpus} - {0})
    raise ClusterError(
        f"{len(gpus)} workers have {different} GPU{'s' * (different != 1)}, and those that divide a model need one each"
        f" or none; {', '.join(alike)} have not: start fewer, or name another one with device= on every worker"
    )


def replicas_of_workers(devices: Sequence[int], requests: Sequence[int]) -> tuple[int, ...]:
    """The number of replicas of each worker. Pure.

    Args:
        devices: the number of devices of each worker.
        requests: the number of replicas of all workers that each was given; 0 is one for each device.

    Returns:
        Blocks in proportion to the devices, each of at least one replica.

    Raises:
        ConfigError: fewer replicas than workers.
        ClusterError: workers that were given different numbers.

    Example:
        >>> replicas_of_workers([1, 1, 1], [8, 8, 8])
        (3, 3, 2)
    """
    replicas, workers = requests[0], len(devices)
    if any(other != replicas for other in requests):
        disagreement = ", ".join(f"{number or None} on worker {worker}" for worker, number in enumerate(requests))
        raise ClusterError(
            f"the workers disagree about replicas=: {disagreement}; run the same program on every worker"
        )
    if not replicas:
        return tuple(devices)
    if replicas < workers:
        raise ConfigError(
            f"replicas={replicas} was given for {workers} workers, expected at least one for each; start fewer workers,"
            " or give more replicas, which trains with other random numbers"
        )
    # Rounded up, and then moved so that each worker has a replica and leaves one for each worker after it.
    ends = [-(-replicas * end // sum(devices)) for end in accumulate(devices)]
    bounds = [0]
    for worker, end in enumerate(ends):
        bounds.append(min(max(end, bounds[-1] + 1), replicas - (workers - 1 - worker)))
    return tuple(end - begin for begin, end in pairwise(bounds))


def compare_machines(names: Sequence[str], kinds: Sequence[str], conditions: Sequence[Conditions]) -> str:
    """One line about the first worker whose machine may compute other bits than the chief's; empty if none. Pure.

    Args:
        names: the workers' names.
        kinds: the kind of each worker's devices, "CPU" or "GPU".
        conditions: those of each worker.

    Raises:
        ClusterError: a worker has another kind of devices than the chief.
    """
    for name, kind, machine in zip(names, kinds, conditions, strict=True):
        if kind != kinds[0]:
            raise ClusterError(
                f"replicas= promises the same bits on every layout, but {names[0]} computes on a {kinds[0]} and {name} "
                f"on a {kind}; choose devices of one kind on all workers, or leave replicas= out"
            )
        if differences := [
            f"{condition} ({chief_value}, {machine.get(condition)})"
            for condition, chief_value in conditions[0].items()
            if machine.get(condition) != chief_value
        ]:
            return (
                f"{names[0]} and {name} differ in {', '.join(differences)}: the last bits of the training may depend "
                "on which replicas each of them computes"
            )
    return ""


class WorkerJob:
    """This worker's part in the job. Every worker must make one; it waits up to ``timeout_s`` seconds for all.

    With ``replicas``, so many are laid on the devices of all workers; ``devices`` has one for each local replica.
    ``threads`` is the number of intra-op threads of each; None divides the cores.
    """

    def __init__(
        self,
        cluster: ClusterSpec | None,
        devices: Sequence[LogicalDevice],
        *,
        timeout_s: float,
        options: CommunicationOptions,
        replicas: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._options = options
        self._threads = threads
        self._optimizers = 0
        self._membership: Membership | None = None
        self._gpus: tuple[int, ...] = ()
        self._nccl = False
        self.devices = tuple(devices) if replicas is None else place_replicas(replicas, devices)
        self.workers: Communicator = SingleWorkerCommunicator(
            len(self.devices), any_layout=replicas is not None, task="worker" if cluster is None else cluster.task
        )
        if cluster is not None and cluster.task == "worker" and cluster.num_workers > 1:
            info = {"devices": len(devices), "replicas": replicas or 0, "gpu": _gpu_id(devices[0].torch_device)}
            self._membership = join(
                cluster, timeout_s=timeout_s, lost_after_s=options.lost_after_s, info={**info, **core_info()}
            )
            infos = self._membership.infos
            divide_cores(infos, cluster.index)
            self._gpus = tuple(info["gpu"] for info in infos)
            # Tensors on GPUs go between workers by NCCL, which adds in an order of its own; else through host memory.
            nccl = has_separate_gpus(self._gpus) and torch.distributed.is_nccl_available()
            self._nccl = nccl and replicas is None
            # Every worker computes the blocks of all from the same infos, so all raise the same error.
            with self._leaving_on_error(self._membership.close):
                blocks = replicas_of_workers([info["devices"] for info in infos], [info["replicas"] for info in infos])
            if replicas is not None:
                self.devices = place_replicas(blocks[cluster.index], devices)
            self.workers = DistributedCommunicator(
                self._membership,
                blocks,
                nccl=self._nccl,
                timeout_s=options.timeout_s,
                any_layout=replicas is not None,
            )

    def check_gpus(self) -> None:
        """Raises a ClusterError on every worker unless each has a GPU of its own, or none has one."""
        with self._leaving_on_error():
            check_gpus(self.workers.names, self._gpus)

    def agree(self, seed: int | None, settings: Sequence[str] = ()) -> int:
        """The seed of all workers, who go on from the chief's random numbers, so that all shuffle alike.

        Raises ClusterError if the workers were given different seeds, options, or ``settings``, a line each.
        """
        with self._leaving_on_error():
            check_agreement(self.workers, "the seed", [f"seed={seed}"])
            check_agreement(self.workers, "the settings of the strategy", [repr(self._options), *settings])
            chiefs = self.workers.all_gather_bytes("the chief's seed", str(torch.initial_seed()).encode())[0]
            # The chief's state and not a new seed: a program that shuffles with torch's default generator goes on alike
            # on all workers, and as it would on one device.
            state = torch.default_generator.get_state()
            self.workers.broadcast("the chief's random numbers", [state])
        if self.workers.size > 1:
            torch.default_generator.set_state(state)
        return int(chiefs) if seed is None else seed

    def compare_machines(self) -> None:
        """Compares what the bits depend on among workers. Every worker must call it; the chief warns.

        Raises a ClusterError if they have different kinds of devices.
        """
        kind = joined(device.kind for device in self.devices)
        local = [kind, conditions_of(self.devices, [self._threads or 1])]
        with self._leaving_on_error():
            gathered = self.workers.all_gather_bytes("what the bits depend on", json.dumps(local).encode())
            kinds, conditions = zip(*map(json.loads, gathered), strict=True)
            warning = compare_machines(self.workers.names, kinds, conditions)
        if warning and self.workers.is_chief:
            _LOG.warning(warning)

    def group(self, name: str, members: Sequence[int]) -> Communicator:
        """A communicator of ``members``, this worker among them, in ascending order. Each of them must ask for it."""
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

    def make_runner(self, seed: int, *, first_replica: int) -> ReplicaRunner:
        """The local replicas' threads. Their runs fail once another worker has ended the job, and vice versa."""
        runner = ReplicaRunner(
            self.devices,
            seed=seed,
            timeout_s=self._options.timeout_s,
            first_replica=first_replica,
            failing=self._fail,
            threads=self._threads,
        )
        if self._membership is not None:
            self._membership.subscribe(runner.abort)
        return runner

    def _fail(self, error: BaseException) -> None:
        # All workers raise a loss that is not finite together, and a program may catch it and go on.
        if self._membership is not None and not isinstance(error, NonFiniteLossError):
            self._membership.report_failure(error)

    def make_exchange(
        self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]], group: Communicator | None = None
    ) -> GradientExchange:
        """How the gradients of an optimizer are summed over ``group``, or all workers. Every worker must ask for it."""
        workers = self.workers if group is None else group
        if not isinstance(workers, DistributedCommunicator):
            return LocalExchange(parameters, groups)
        # A stream of its own for each optimizer, whose sums run beside those of others; the number is equal on all.
        self._optimizers += 1
        return BucketExchange(
            parameters,
            [group[0] for group in groups],
            workers=workers,
            bucket_bytes=self._options.bucket_bytes,
            stream=workers.new_group(f"gradients of optimizer {self._optimizers}", parameters[0][0].device),
            travel_as=self._options.travel_as,
            marks=GradientMarks(self.devices),
        )

    def make_sharing(
        self, parameters: Sequence[Copies], group: Communicator, kinds: Sequence[Hashable]
    ) -> ShardingGroup | None:
        """The workers of ``group``, if several divide the state of an optimizer: parameters of one kind among them.

        Each of them must ask for it, right after its ``make_exchange``.
        """
        if not isinstance(group, DistributedCommunicator):
            return None
        stream = group.new_group(f"shares of optimizer {self._optimizers}", parameters[0][0].device)
        return ShardingGroup(workers=group, stream=stream, window_bytes=self._options.bucket_bytes, kinds=kinds)

    @contextmanager
    def _leaving_on_error(self, leave: Callable[[], None] | None = None) -> Iterator[None]:
        try:
            yield
        except LockstepError as error:
            self._fail(error)
            (leave or self.workers.close)()
            raise


def _gpu_id(device: torch.device) -> int:
    """A number for the GPU in this host; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    # By UUID: the number of a device in a process depends on CUDA_VISIBLE_DEVICES.
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) or 1


def check_job_settings(
    cluster: ClusterSpec | None, seed: int | None, timeout_s: float, communication: CommunicationOptions | None
) -> None:
    """Checks what the strategies of several workers are given alike. Raises ConfigError."""
    check_kind("cluster", cluster, ClusterSpec, "a ls.ClusterSpec")
    check_number("seed", seed, whole=True)
    check_seconds("timeout_s", timeout_s)
    check_kind("communication", communication, CommunicationOptions, "ls.CommunicationOptions")


class MultiWorkerMirroredStrategy(ThreadedStrategy):
    """Trains one model on the devices of many workers as if on one.

    Every worker is a process that runs the same program; this constructor waits until all are there. A worker that
    fails, stops or cannot be reached ends the job on all others with an error that names it. Close the strategy at the
    end: until then, or the end of the process, this worker is in the job.

    Args:
        devices: this worker's; None is every logical GPU, or its part of those that all workers of its host see; else
            every logical CPU device. Workers may have different numbers of them.
        replicas: the number of replicas of all workers, laid on their devices in blocks. The numbers of the training
            then depend on it alone, to the last bit, and not on workers and devices of one kind; sums of GPUs go
            through host memory for it. None is one replica for each device.
        cluster: who takes part; None is what TF_CONFIG or the variables of a launcher say: torchrun's, mpirun's,
            SLURM's and others; or the process group of torch that is there already, as under Ray Train. Without any,
            this process is the only worker.
        seed: of the replicas' random numbers, the same on every worker; None is the chief's ``torch.initial_seed()``.
        timeout_s: how many seconds to wait for all workers at the start.
        communication: how they communicate afterwards.
        threads_per_replica: the intra-op threads of each replica on a CPU; None divides the cores, or is 1 with
            ``replicas``: torch's last bits depend on it.

    Raises:
        ConfigError: an unknown device, or one named twice; a number that cannot be; fewer replicas than workers.
        ClusterError: a malformed cluster; a process group of torch of another size or rank; workers that did not come;
            workers that disagree.
    """

    @tensorflow_names.advise(tensorflow_names.ARGUMENTS)
    def __init__(
        self,
        devices: Sequence[str | torch.device | LogicalDevice] | None = None,
        *,
        replicas: int | None = None,
        cluster: ClusterSpec | None = None,
        seed: int | None = None,
        timeout_s: float = START_TIMEOUT_S,
        communication: CommunicationOptions | None = None,
        threads_per_replica: int | None = None,
    ) -> None:
        check_job_settings(cluster, seed, timeout_s, communication)
        threads = check_replicas(replicas, threads_per_replica)
        if replicas is not None and communication is not None and communication.compression is not None:
            raise ConfigError(
                f"replicas={replicas} and compression={communication.compression!r} were given, but what is rounded on "
                "its way between workers depends on their number; leave one of them out"
            )
        self.communication = communication or CommunicationOptions()
        self.cluster = cluster_of_process(cluster)
        replica_devices = select_devices(worker_devices(self.cluster) if devices is None else devices)
        job = WorkerJob(
            self.cluster,
            replica_devices,
            timeout_s=timeout_s,
            options=self.communication,
            replicas=replicas,
            threads=threads,
        )
        seed = job.agree(seed, [f"threads_per_replica={threads}"])
        if replicas is not None:
            job.compare_machines()
        runner = job.make_runner(seed, first_replica=job.workers.first_replica)
        super().__init__(job.devices, job.workers, runner, job.make_exchange)

    def __repr__(self) -> str:
        place = f"worker {self.workers.index} of {self.workers.size}" if self.task == "worker" else self.task
        return f"MultiWorkerMirroredStrategy({describe_devices(self)}, {place})"
