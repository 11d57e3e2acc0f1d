"""ParallelStrategy: models larger than a device, divided among workers, with as many replicas as the workers allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.cluster.resolve import cluster_from_environment
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communicator import OneWorker
from lockstep.collectives.options import CommunicationOptions, check_waiting_time
from lockstep.config import LogicalDevice, resolve_devices
from lockstep.errors import ConfigError
from lockstep.mirroring.exchange import Copies, GradientExchange
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.part_exchange import PartExchange
from lockstep.parallel.mesh_layout import Grid, choose_grid
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipelining
from lockstep.replicas.rng.state import ReplicaGenerators, replica_generator
from lockstep.replicas.runner import ReplicaRunner
from lockstep.strategies.job import Job
from lockstep.strategies.own_gpus import own_devices
from lockstep.strategies.teams import make_teams
from lockstep.strategies.threaded import ThreadedStrategy, observed

if TYPE_CHECKING:
    from lockstep.parallel.pipeline_stage import PipelineSplit
    from lockstep.parallel.tensor_parallel import TensorPlan

START_TIMEOUT_S = 600.0


class ParallelStrategy(ThreadedStrategy):
    """Trains one model whose copies are each divided among several workers.

    Every worker is a process with one device that runs the same program; ``data * pipeline * tensor`` of them make the
    job. The workers that hold a copy together are one replica: they see the same shard of every global batch, and the
    numbers are those of one device on the whole batch.

    Args:
        data: replicas; -1 is as many as the workers allow.
        pipeline: workers that divide the layers of a copy, in stages.
        tensor: workers that share each layer.
        microbatches: parts of a shard in a pipeline; None is two for every worker of it.
        schedule: the order in which a pipeline takes them: "1f1b", "gpipe", "interleaved", "zero_bubble" or
            "zero_bubble_v".
        stages_per_worker: stages that each worker of a pipeline holds; None is two where the schedule is one of the
            last three, else one.
        shard_optimizer: whether each replica keeps the optimizer's state of a share of the weights only, as ZeRO's
            first stage does; the numbers stay the same.
        shard_parameters: whether each replica keeps a share of the weights and gradients too, and borrows the others'
            layer by layer (PyTorch's FSDP); in a pipeline for each microbatch.
        sequence_parallel: whether tensor ranks divide, along the sequence, what they would all hold alike.
        device: this worker's; None is the GPU of its place among the workers of its host, or else its first logical
            CPU device. Workers with GPUs have one each: NCCL takes no two on one.
        cluster: who takes part; None is what the environment says.
        seed: of all random numbers, the same on every worker; None is the chief's ``torch.initial_seed()``.
        timeout_s: how many seconds to wait for all workers at the start.
        communication: how they talk to each other afterwards.

    Raises:
        ConfigError: degrees that do not fit the number of workers, or what does not work yet.
        UsageError: the program has initialised torch's process groups itself.
        ClusterError: a malformed cluster; workers that did not come; workers that disagree.

    Example:
        >>> import lockstep as ls
        >>> strategy = ls.ParallelStrategy()
        >>> strategy.grid
        Grid(data=1, pipeline=1, tensor=1)
    """

    def __init__(
        self,
        *,
        data: int = -1,
        pipeline: int = 1,
        tensor: int = 1,
        microbatches: int | None = None,
        schedule: ScheduleName = "1f1b",
        stages_per_worker: int | None = None,
        shard_optimizer: bool = False,
        shard_parameters: bool = False,
        sequence_parallel: bool = False,
        device: str | torch.device | LogicalDevice | None = None,
        cluster: ClusterSpec | None = None,
        seed: int | None = None,
        timeout_s: float = START_TIMEOUT_S,
        communication: CommunicationOptions | None = None,
    ) -> None:
        check_waiting_time("timeout_s", timeout_s)
        self.communication = communication or CommunicationOptions()
        self.cluster = cluster if cluster is not None else cluster_from_environment()
        self.grid: Grid = choose_grid(_workers(self.cluster), data=data, pipeline=pipeline, tensor=tensor)
        pipelining = choose_pipelining(schedule, microbatches, self.grid.pipeline, stages_per_worker)
        devices = observed(resolve_devices([own_devices(self.cluster)[0] if device is None else device]))
        job = self._job = Job(self.cluster, devices, timeout_s=timeout_s, options=self.communication)
        job.check_gpus()
        _check_sequence_parallel(sequence_parallel, self.grid.tensor)
        sharded = [f"shard_optimizer={shard_optimizer}", f"shard_parameters={shard_parameters}"]
        seed = job.agree(seed, [str(self.grid), repr(pipelining), *sharded, f"sequence_parallel={sequence_parallel}"])
        self._shard_optimizer = shard_optimizer
        self._teams = make_teams(job, self.grid)
        own_seed = _stage_seed(seed, self._teams.place.stage)
        runner = ReplicaRunner(
            devices,
            seed=own_seed,
            timeout_s=self.communication.timeout_s,
            first_replica=self._teams.place.replica,
            failing=job.fail,
        )
        job.when_over(runner.abort)
        # torch's packages under these take 1.3 s to import, which a program without them is spared.
        from lockstep.parallel.mesh import make_mesh
        from lockstep.strategies.parts import ModelParts

        own_device = devices[0].torch_device
        self._mesh = make_mesh(job.workers, self.grid, timeout_s=self.communication.timeout_s, device=own_device)
        self._own = replica_generator(own_seed, -1 - job.workers.index)
        self._parts = ModelParts(
            self._teams, self._mesh, pipelining=pipelining, shard_parameters=shard_parameters, own=self._own,
            device=own_device, seed=seed, sequence_parallel=sequence_parallel,
        )  # fmt: skip
        view = self._teams.replicas(pipelining.last_worker, [] if self._mesh is None else [self._mesh.close])
        super().__init__(devices, view, runner, self._exchange_of, holding=self._parts, guard=self._explaining)

    def parallelize(
        self, module: nn.Module, tensor_plan: TensorPlan = "auto", pipeline_split: PipelineSplit = "auto"
    ) -> MirroredModule:
        """Divides a module among the workers of each replica. Every worker must call it, with the same module.

        All go on from the chief's weights. The module is divided in place: afterwards it is this worker's part.

        Args:
            module: the whole model. ``ls.Model(module)`` divides it by "auto" if this has not been called.
            tensor_plan: "auto" for transformers' BERT, GPT-2 and Llama; else names of modules, with "*" for any, to
                styles, as ``torch.distributed.tensor.parallel.parallelize_module`` takes them.
            pipeline_split: "auto" for those models, by the weights of the layers and of the head; else the number of
                layers of each stage.

        Raises:
            ConfigError: a model of no known family, or sizes that the degrees do not divide.
            ClusterError: another worker has another module.
        """
        self._outside("parallelize")
        return self.mirror(self._parts.divide(module, tensor_plan, pipeline_split))

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of this worker stand, for checkpoints."""
        return super().generators.with_apart(self._own)

    def __repr__(self) -> str:
        return f"ParallelStrategy({self.grid}, worker {self._job.workers.index} of {self._job.workers.size})"

    def _exchange_of(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> GradientExchange:
        firsts, shared = [copies[0] for copies in parameters], self._parts.shares_weights
        # Of shared weights the gradients have been summed by the backward pass.
        peers = OneWorker(1) if shared else self._teams.peers
        between_replicas = self._job.make_exchange(parameters, groups, peers)
        if self._mesh is None and self.devices[0].kind == "GPU":
            return between_replicas  # nobody to exchange with: nothing need pass through the host
        sharing = None
        if self._shard_optimizer:
            sharing = self._job.make_sharing(parameters, peers, self._parts.kinds(firsts))
        return PartExchange(
            between_replicas,
            workers=self.workers,
            holders=self._teams.job if shared else self._teams.replica,
            counted=self._parts.counted(firsts),
            tied=self._parts.tied(firsts),
            twin=self._teams.twin,
            sharing=sharing,
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises, for a connection between workers that broke, what broke it. Goes around what a replica does."""
        try:
            with self._parts.draws.going_along():
                yield
        except RuntimeError as error:
            explained = None if self._mesh is None else self._mesh.explain(error, "a collective of the model's parts")
            if explained is None:
                raise
            raise explained from error


def _workers(cluster: ClusterSpec | None) -> int:
    return cluster.num_workers if cluster is not None and cluster.task == "worker" else 1


def _stage_seed(seed: int, stage: int) -> int:
    """Stages draw numbers of their own: layers of two stages must not drop the same units."""
    return seed if stage == 0 else replica_generator(seed, -stage).initial_seed()


def _check_sequence_parallel(asked: bool, tensor: int) -> None:
    if asked and tensor == 1:
        raise ConfigError(
            "sequence_parallel=True divides sequences among the workers of a layer, and with tensor=1 there is one; "
            "choose tensor=2 or more, or leave it out"
        )
