"""A process's part in a job of several workers: joined, agreed on how to train, and able to exchange gradients.

For a process that is the only worker, or stands beside the training as an evaluator, all of it is nothing.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lockstep.cluster.local import core_card, divide_cores
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communicator import OneWorker, Workers, agree
from lockstep.collectives.distributed import RemoteWorkers
from lockstep.collectives.options import CommunicationOptions
from lockstep.config import LogicalDevice
from lockstep.errors import LockstepError, NonFiniteLossError
from lockstep.membership.membership import Membership, join
from lockstep.mirroring.buckets import BucketExchange
from lockstep.mirroring.exchange import Copies, GradientExchange, LocalExchange
from lockstep.mirroring.gradient_marks import GradientMarks
from lockstep.mirroring.sharing import Sharing
from lockstep.strategies.own_gpus import check_gpus, each_has_its_own


class Job:
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
        self.workers: Workers = OneWorker(len(devices))
        if cluster is not None and cluster.task == "worker" and cluster.num_workers > 1:
            info = {"replicas": len(devices), "gpu": _gpu_id(devices[0].torch_device), **core_card()}
            self._membership = join(cluster, timeout_s=timeout_s, lost_after_s=options.lost_after_s, info=info)
            divide_cores(self._membership.infos, cluster.index)
            self._gpus = tuple(info["gpu"] for info in self._membership.infos)
            self.workers = RemoteWorkers(
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
            agree(self.workers, "the seed", [f"seed={seed}"])
            agree(self.workers, "the settings of the strategy", [repr(self._options), *settings])
            chiefs = self.workers.exchange_bytes("the chief's seed", str(torch.initial_seed()).encode())[0]
            state = torch.default_generator.get_state()
            self.workers.broadcast("the chief's random numbers", [state])
        if self.workers.size > 1:
            torch.default_generator.set_state(state)
        return int(chiefs) if seed is None else seed

    def team(self, name: str, members: Sequence[int]) -> Workers:
        """Some of the workers, among them this one, as if they were all. Every one of them must ask for it.

        Args:
            name: what the team is called; no worker is in two of one name.
            members: their numbers, ascending.
        """
        if not isinstance(self.workers, RemoteWorkers) or len(members) == 1:
            return OneWorker(1)
        return RemoteWorkers(
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
            self._membership.failed(error)

    def when_over(self, stop: Callable[[BaseException], None]) -> None:
        """Has ``stop`` called once, from another thread, when another worker has ended the job."""
        if self._membership is not None:
            self._membership.subscribe(stop)

    def make_exchange(
        self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]], team: Workers | None = None
    ) -> GradientExchange:
        """How the gradients of an optimizer over ``parameters`` are summed. Every worker must ask for it.

        Args:
            parameters: per parameter its local copies.
            groups: the local replicas by storage.
            team: the workers over which to sum; None is all.
        """
        workers = self.workers if team is None else team
        if not isinstance(workers, RemoteWorkers):
            return LocalExchange(parameters, groups)
        self._optimizers += 1
        return BucketExchange(
            parameters,
            [group[0] for group in groups],
            workers=workers,
            bucket_bytes=self._options.bucket_bytes,
            stream=workers.stream(f"gradients of optimizer {self._optimizers}", parameters[0][0].device),
            travel_as=self._options.travel_as,
            marks=GradientMarks(self._devices),
        )

    def make_sharing(self, parameters: Sequence[Copies], team: Workers, kinds: Sequence[Hashable]) -> Sharing | None:
        """The workers of a team as those who share the state of an optimizer; None where there is one.

        Every one of them must ask for it, right after its ``make_exchange``.

        Args:
            parameters: per parameter its local copies, of which there is one.
            team: they hold the same weights.
            kinds: per parameter, what it is like: parameters of one kind are divided by themselves.
        """
        if not isinstance(team, RemoteWorkers):
            return None
        name = f"shares of optimizer {self._optimizers}"
        return Sharing(
            workers=team,
            stream=team.stream(name, parameters[0][0].device),
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
