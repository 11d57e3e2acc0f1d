"""MultiWorkerMirroredStrategy: many processes, on one host or many, each with its local replicas."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.cluster.resolve import cluster_from_environment
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.agreement import agree
from lockstep.collectives.caller import caller
from lockstep.collectives.communication import CommunicationOptions, check_waiting_time
from lockstep.collectives.remote import RemoteWorkers
from lockstep.collectives.workers import OneWorker, Workers
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.errors import ConfigError, NonFiniteLossError
from lockstep.membership.membership import Membership, join
from lockstep.mirroring.bucket_plan import plan_buckets
from lockstep.mirroring.buckets import BucketExchange
from lockstep.mirroring.exchange import Copies, GradientExchange, LocalExchange
from lockstep.replicas.generators import ReplicaGenerators
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import observed

START_TIMEOUT_S = 600.0


class MultiWorkerMirroredStrategy(Strategy):
    """Trains one model on the devices of many workers as if on one.

    Every worker is a process that runs the same program; this constructor waits until all are there. The numbers are
    those of one device on the whole global batch, for any number of workers and replicas. A worker that fails, stops or
    cannot be reached ends the job on all others with an error that names it. Close the strategy at the end: until then,
    or the end of the process, this worker is in the job.

    Args:
        devices: this worker's devices; None is every logical GPU, else every logical CPU device. Each worker's own
            number of them may differ.
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
        self.communication = options = communication or CommunicationOptions()
        super().__init__(self._make_exchange)
        self._optimizers = 0
        self._devices = observed(resolve_devices(devices))
        self.cluster = cluster if cluster is not None else cluster_from_environment()
        self._membership = _join(self.cluster, self._devices, timeout_s, options.lost_after_s)
        self._workers = _workers(self._membership, self._devices, options.timeout_s)
        try:
            seed = self._agree(seed)
        except BaseException as error:
            self._fail(error)
            raise
        self._runner = ReplicaRunner(
            self._devices,
            seed=seed,
            timeout_s=options.timeout_s,
            first_replica=self._workers.first_replica,
            failing=self._fail,
        )
        if self._membership is not None:
            self._membership.subscribe(self._runner.abort)

    @property
    def devices(self) -> tuple[LogicalDevice, ...]:
        """The logical devices of this worker's replicas, in replica order."""
        return self._devices

    @property
    def workers(self) -> Workers:
        """All workers, as this one sees them."""
        return self._workers

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of the local replicas stand, for checkpoints."""
        return self._runner.generators

    def trial(self) -> AbstractContextManager[None]:
        """Opens a block whose runs leave the replicas' random numbers, and their accounts of memory, as they were."""
        return self._runner.trial()

    def close(self) -> None:
        """Ends the replica threads and leaves the job. The others may go on with what they do alone."""
        self._runner.close()
        if isinstance(self._workers, RemoteWorkers):
            self._workers.close()

    def _agree(self, seed: int | None) -> int:
        """The seed of all workers; and all go on from the chief's random numbers, so that all shuffle alike."""
        agree(self._workers, "the seed", [f"seed={seed}"])
        agree(self._workers, "the settings of the strategy", [repr(self.communication)])
        drawn = self._workers.exchange_bytes("the chief's seed", str(torch.initial_seed()).encode())
        state = torch.default_generator.get_state()
        self._workers.broadcast("the chief's random numbers", [state])
        if self._workers.size > 1:
            torch.default_generator.set_state(state)
        return int(drawn[0]) if seed is None else seed

    def _execute(
        self, fn: Callable[..., Any], bodies: Sequence[Callable[[], Any]], rows: Sequence[int | None]
    ) -> list[Any]:
        self._workers.doing(f"a run of {_name(fn)} ({caller()})")
        return self._runner.run(self, fn, bodies, rows)

    def _fail(self, error: BaseException) -> None:
        # A loss that is not finite all workers raise together, and may go on together.
        if self._membership is not None and not isinstance(error, NonFiniteLossError):
            self._membership.failed(error)

    def _make_exchange(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> GradientExchange:
        if not isinstance(self._workers, RemoteWorkers):
            return LocalExchange(parameters, groups)
        firsts = [copies[0] for copies in parameters]
        self._optimizers += 1
        return BucketExchange(
            parameters,
            [group[0] for group in groups],
            workers=self._workers,
            plan=plan_buckets(
                [parameter.numel() * parameter.element_size() for parameter in firsts],
                [f"{parameter.dtype} {parameter.device}" for parameter in firsts],
                self.communication.bucket_bytes,
            ),
            stream=self._workers.stream(f"gradients of optimizer {self._optimizers}", firsts[0].device),
            travel_as=self.communication.travel_as,
        )

    def __repr__(self) -> str:
        names = ", ".join(device.name for device in self._devices)
        return f"MultiWorkerMirroredStrategy([{names}], worker {self._workers.index} of {self._workers.size})"


def _join(
    cluster: ClusterSpec | None, devices: Sequence[LogicalDevice], timeout_s: float, lost_after_s: float
) -> Membership | None:
    """Joins the job; None for a process that is the only worker, or stands beside the training as an evaluator."""
    if cluster is None or cluster.task != "worker" or cluster.num_workers == 1:
        return None
    info = {"replicas": len(devices), "gpu": _gpu_id(devices[0].torch_device)}
    return join(cluster, timeout_s=timeout_s, lost_after_s=lost_after_s, info=info)


def _workers(membership: Membership | None, devices: Sequence[LogicalDevice], timeout_s: float) -> Workers:
    if membership is None:
        return OneWorker(len(devices))
    gpus = [info["gpu"] for info in membership.infos]
    # NCCL refuses two workers on one GPU.
    nccl = all(gpus) and len(set(gpus)) == len(gpus) and torch.distributed.is_nccl_available()
    return RemoteWorkers(membership, [info["replicas"] for info in membership.infos], nccl=nccl, timeout_s=timeout_s)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _gpu_id(device: torch.device) -> int:
    """A number for the GPU in this host; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6]) or 1
