"""ParallelStrategy: models larger than a device, divided among workers, with as many replicas as the workers allow.

``MeshGroups`` are the communicators of one worker of the mesh; ``ModelParts`` turns a module into this worker's part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import tensorflow_names
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communicator import (
    CommunicationOptions,
    Communicator,
    MeshCommunicator,
    SingleWorkerCommunicator,
    check_agreement,
)
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.gradients.local_sum import Copies, GradientExchange, PartExchange
from lockstep.mirroring.gradients.parameter_hooks import call_in_backward, divided_error, hooked
from lockstep.mirroring.module.module import MirroredModule, signature
from lockstep.mirroring.optim.storage_optimizers import ELEMENTWISE
from lockstep.mirroring.partition import PartitionPolicy
from lockstep.parallel.mesh_layout import MeshLayout, choose_mesh_layout
from lockstep.parallel.model_build import ModelBuilder
from lockstep.parallel.model_plan import PlanSettings, plan_model
from lockstep.parallel.pipeline import WITHOUT_PENALTY, Pipeline
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipeline_config
from lockstep.parallel.pipeline_stage import PipelineSplit
from lockstep.parallel.sharded_module import ShardedModule, is_divided
from lockstep.parallel.tensor_plan import TensorPlan
from lockstep.parallel.tp_rng import DeviceRng, TensorParallelRng
from lockstep.replicas.rng.generators import ReplicaGenerators, replica_generator
from lockstep.strategies.base import ThreadedStrategy, select_devices
from lockstep.strategies.multi_worker import (
    START_TIMEOUT_S,
    WorkerJob,
    check_job_settings,
    cluster_of_process,
    worker_devices,
)


class MeshGroups:
    """The communicators of one worker, made in an order that cannot deadlock. Every worker must make them.

    ``coordinate`` is this worker's in the ``layout`` of the mesh, and ``job`` all workers.

    Attributes:
        peers: the workers that hold the same part of the model, one for each replica.
        replica: the workers that hold this replica.
        pipeline: the workers of all stages of this replica and tensor rank, in stage order; None without a pipeline.
        pipeline_ends: the first and the last of them; None for other workers, and without a pipeline.
    """

    def __init__(self, job: WorkerJob, layout: MeshLayout) -> None:
        index = job.workers.index
        stages = layout.pipeline_group(index)
        ends = (stages[0], stages[-1])
        self.layout, self.coordinate, self.job = layout, layout.coordinate(index), job.workers
        self.peers = job.group("peers", layout.data_group(index))
        self.replica = job.group("replica", layout.replica_group(self.coordinate.replica))
        self.pipeline = job.group("pipeline", stages) if layout.pipeline > 1 else None
        self.pipeline_ends = job.group("pipeline ends", ends) if layout.pipeline > 1 and index in ends else None

    def replicas(self, last: int, ends_with: Sequence[Callable[[], None]]) -> MeshCommunicator:
        """A communicator in which each replica is one worker, that of stage ``last``; ``ends_with`` closes it first."""
        return MeshCommunicator(
            self.job,
            replica=self.coordinate.replica,
            leaders=self.layout.leaders(last),
            chief=self.job.leads,
            layout="" if self.job.is_single else str(self.layout),
            ends_with=[*ends_with, self._close],
        )

    def _close(self) -> None:
        for group in (self.peers, self.replica, self.pipeline, self.pipeline_ends):
            if group is not None:
                group.close()


class ParallelStrategy(ThreadedStrategy):
    """Trains one model whose copies are each divided among several workers.

    Every worker is a process with one device that runs the same program; ``data * pipeline * tensor`` of them make the
    job. The workers that hold a copy together are one replica and see the same shard of every global batch.

    Args:
        data: replicas; -1 is as many as the workers allow.
        pipeline: workers that divide the layers of a copy, in stages.
        tensor: workers that share each layer.
        microbatches: parts of a shard in a pipeline; None is two for each of its workers.
        schedule: the order in which a pipeline takes them: "1f1b", "gpipe", "interleaved", "zero_bubble" or
            "zero_bubble_v".
        stages_per_worker: stages of each worker of a pipeline; None is two with the last three schedules, else one.
        shard_optimizer: whether each replica keeps the optimizer's state of a share of the weights only (ZeRO-1).
        shard_parameters: whether each replica keeps a share of the weights and gradients too (PyTorch's FSDP);
            not in a pipeline.
        sequence_parallel: whether tensor ranks divide, along the sequence, what they would all hold alike.
        device: this worker's; None is its GPU among the workers of its host, or else its first logical CPU device.
            Workers with GPUs have one each: NCCL takes no two on one.
        cluster, seed, timeout_s, communication: as in ``MultiWorkerMirroredStrategy``.

    Raises:
        ConfigError: degrees that do not fit the number of workers, or what does not work together.
        ClusterError: a malformed cluster; a process group of torch of another size or rank; workers that did not come;
            workers that disagree.
    """

    @tensorflow_names.advise(tensorflow_names.ARGUMENTS)
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
        check_job_settings(cluster, seed, timeout_s, communication)
        self.communication = communication or CommunicationOptions()
        self.cluster = cluster_of_process(cluster)
        cluster = self.cluster
        workers = cluster.num_workers if cluster is not None and cluster.task == "worker" else 1
        self.layout = choose_mesh_layout(workers, data=data, pipeline=pipeline, tensor=tensor)
        pipelining = choose_pipeline_config(schedule, microbatches, self.layout.pipeline, stages_per_worker)
        settings = PlanSettings(
            layout=self.layout, pipelining=pipelining, shard_parameters=shard_parameters,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        devices = select_devices([worker_devices(self.cluster)[0] if device is None else device])
        job = self._job = WorkerJob(self.cluster, devices, timeout_s=timeout_s, options=self.communication)
        job.check_gpus()
        sharded = [f"shard_optimizer={shard_optimizer}", f"shard_parameters={shard_parameters}"]
        seed = job.agree(seed, [str(self.layout), repr(pipelining), *sharded, f"sequence_parallel={sequence_parallel}"])
        self._shard_optimizer = shard_optimizer
        self._groups = MeshGroups(job, self.layout)
        # Stages draw numbers of their own: layers of two stages must not drop the same units. Replicas' generators have
        # the numbers from 0 on, so stages and ranks have negative ones.
        stage = self._groups.coordinate.stage
        stage_seed = seed if stage == 0 else replica_generator(seed, -stage).initial_seed()
        runner = job.make_runner(stage_seed, first_replica=self._groups.coordinate.replica)
        # torch's packages under these take 1.3 s to import, which a program without them is spared.
        from lockstep.parallel.mesh import make_mesh

        torch_device = devices[0].torch_device
        self._mesh = make_mesh(job.workers, self.layout, timeout_s=self.communication.timeout_s, device=torch_device)
        self._rank_generator = replica_generator(stage_seed, -1 - job.workers.index)
        rank_seed = self._rank_generator.initial_seed()
        builder = ModelBuilder(
            settings=settings, workers=job.workers, pipeline=self._groups.pipeline, mesh=self._mesh,
            device=torch_device, rng=TensorParallelRng(self._rank_generator, _on_gpu(torch_device, rank_seed)),
            receive=call_in_backward,
        )  # fmt: skip
        self._builder = builder
        self._parts = ModelParts(self._groups, builder, shard_optimizer=shard_optimizer, seed=seed)
        view = self._groups.replicas(pipelining.last_worker, [] if self._mesh is None else [self._mesh.close])
        super().__init__(
            devices, view, runner, self._exchange_of, partition=self._parts, replica_block=self._explaining
        )

    def parallelize(
        self,
        module: nn.Module,
        tensor_plan: TensorPlan = "auto",
        pipeline_split: PipelineSplit = "auto",
        *,
        weights: str | os.PathLike[str] | None = None,
    ) -> MirroredModule:
        """Divides a module in place among the workers of each replica. Every worker must call it, with the same module.

        All go on from the chief's weights, or from those in files.

        Args:
            module: the whole model. ``ls.Model(module)`` divides it by "auto" if this has not been called.
            tensor_plan: "auto" for models of transformers that have plans of their own, and BERT, RoBERTa, DistilBERT,
                GPT-2 and ViT; else names of modules, with "*" for any, to styles, as torch's ``parallelize_module``
                takes them. Ignored with ``tensor=1``.
            pipeline_split: "auto" for those models, for an ``nn.Sequential`` and for a module with one list of blocks;
                or the number of layers of each stage; or the names of the modules at which the second and each further
                stage begins, for any module. Ignored with ``pipeline=1``.
            weights: a folder that transformers' ``save_pretrained`` has written, or a safetensors file, which all
                workers see. Each reads its part of the tensors, and converts them to the module's dtypes. Make the
                module on the meta device, so that nothing else is held.

        Raises:
            ConfigError: a model that the degrees divide and neither "auto" nor what is given says how; names of no
                modules; a forward that cannot be traced; a style of a model's own plan that is not supported; sizes
                that the degrees do not divide. No weight has been sent then.
            ClusterError: another worker has another module, or sees other files.
            CheckpointError: the files lack a tensor, have one that the module does not have or with another shape, or
                cannot be read; on all workers.
        """
        self._outside("parallelize")
        return self.mirror(self._parts.divide(module, tensor_plan, pipeline_split, weights))

    @property
    def generators(self) -> ReplicaGenerators:
        """Where the random numbers of this worker stand, for checkpoints."""
        return super().generators.with_part(self._rank_generator)

    def __repr__(self) -> str:
        workers = self._job.workers
        place = f"worker {workers.index} of {workers.size}" if self.task == "worker" else self.task
        return f"ParallelStrategy({self.layout}, {place})"

    def _exchange_of(self, parameters: Sequence[Copies], groups: Sequence[Sequence[int]]) -> GradientExchange:
        # The mesh is one device a worker, so there is one copy of each parameter.
        firsts, sharded = [copies[0] for copies in parameters], self._parts.shards_weights
        # The gradients of sharded weights have been summed by the backward pass.
        peers = SingleWorkerCommunicator(1) if sharded else self._groups.peers
        between_replicas = self._job.make_exchange(parameters, groups, peers)
        if self._mesh is None and self.devices[0].kind == "GPU":
            return between_replicas  # nobody to exchange with: nothing need pass through the host
        kinds = self._parts.kinds(firsts)
        sharing = self._job.make_sharing(parameters, peers, kinds) if self._shard_optimizer else None
        return PartExchange(
            between_replicas=between_replicas,
            workers=self.workers,
            holders=self._groups.job if sharded else self._groups.replica,
            counted=self._parts.counted(firsts),
            tied=self._parts.tied(firsts),
            tied_group=self._groups.pipeline_ends,
            sharing=sharing,
            whole=self._parts.whole(firsts),
            part=(self._groups.coordinate.replica, self._groups.coordinate.stage),
            holds=self._parts.holdings(sharing is not None),
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """A block around a replica's part of a run. It replaces an error of a broken connection by what broke it."""
        try:
            with self._builder.rng.with_replica():
                yield
        except RuntimeError as error:
            # torch 2.13 raises this as a plain RuntimeError, which only its text tells from others.
            if "mixed torch.Tensor and DTensor" in str(error):
                raise UsageError(
                    "the step computes with a weight that the layout divides among workers beside plain tensors, "
                    f"outside of the layers that the plan divides; {WITHOUT_PENALTY}"
                ) from error
            explained = None if self._mesh is None else self._mesh.explain(error, "a collective of the model's parts")
            if explained is None:
                raise
            raise explained from error


_DIVISION = "_lockstep_division"
"""The attribute of a module that was divided in place: it cannot be divided once more."""


class DivisionOf:
    """Records the part that a module was divided to, by which policy and with which arguments, for the module's life.

    A copy of the module has one too, without a part.
    """

    def __init__(self, owner: ModelParts | None = None, part: ShardedModule | None = None, arguments: str = "") -> None:
        self.owner, self.part, self.arguments = owner, part, arguments

    def __reduce__(self) -> tuple[type[DivisionOf], tuple[()]]:
        return DivisionOf, ()


def _arguments(plan: TensorPlan, split: PipelineSplit) -> str:
    """The arguments of ``parallelize``, equal for styles that are made anew alike."""
    split = split if isinstance(split, str) else list(split)  # type: ignore[assignment]
    if isinstance(plan, str):
        return f"tensor_plan={plan!r}, pipeline_split={split!r}"
    styles = ", ".join(f"{name!r}: {_style_text(style)}" for name, style in plan.items())
    return f"tensor_plan={{{styles}}}, pipeline_split={split!r}"


def _style_text(style: object) -> str:
    # torch sets src_data_rank as it applies a style; the arguments of its constructor are those without "desired".
    values = {name: value for name, value in vars(style).items() if name.endswith("_layouts") and "desired" not in name}
    return f"{type(style).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"


class ModelParts(PartitionPolicy):
    """This worker's parts of models.

    ``seed`` is that of the initial weights of models on the meta device.
    """

    def __init__(self, groups: MeshGroups, builder: ModelBuilder, *, shard_optimizer: bool, seed: int) -> None:
        self._groups, self._layout, self._coordinate = groups, groups.layout, groups.coordinate
        self._builder, self._settings = builder, builder.settings
        self.parts = builder.mesh is not None
        self._holds_parts = (
            shard_optimizer or self._settings.shard_parameters or max(groups.layout.pipeline, groups.layout.tensor) > 1
        )
        self.shards_weights = self._settings.shards_weights
        self._seed, self._drawn = seed, 0
        # Weak: a part lives as long as its model, and this policy as long as the strategy.
        self._parts: WeakValueDictionary[int, ShardedModule] = WeakValueDictionary()

    def peers(self, workers: Communicator) -> Communicator:
        return self._groups.peers

    def take(self, module: nn.Module) -> nn.Module:
        part = module if isinstance(module, ShardedModule) else self._part_of(module)
        return self.divide(module, "auto", "auto") if part is None else part

    def pipeline(self, module: nn.Module) -> Pipeline | None:
        return module.pipeline if isinstance(module, ShardedModule) else None

    def source_of(self, weight: nn.Parameter) -> nn.Parameter:
        sources = (part.source_of(weight) for part in self._parts.values())
        return next((source for source in sources if source is not None), weight)

    def holders(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return module.holders if isinstance(module, ShardedModule) else module.parameters()

    def is_divided(self, weight: nn.Parameter) -> bool:
        return is_divided(self.source_of(weight))

    def check(self, optimizer: Optimizer) -> None:
        """Raises a ConfigError unless it updates each number by itself, which is the same on parts and the whole.

        Where workers hold whole models and their whole state, it may do anything.
        """
        if not self._holds_parts:
            return
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}, which may look at whole weights, and a worker holds "
                f"parts; choose one of torch's {names}"
            )

    def divide(
        self,
        module: nn.Module,
        plan: TensorPlan,
        split: PipelineSplit,
        weights: str | os.PathLike[str] | None = None,
    ) -> ShardedModule:
        """Divides a module, once; see ``ParallelStrategy.parallelize``. Every worker must call it."""
        part = module if isinstance(module, ShardedModule) else self._part_of(module)
        if part is None:
            part = self._parts[id(module)] = self._planned_and_built(module, plan, split, weights)
            module.__dict__[_DIVISION] = DivisionOf(self, part, _arguments(plan, split))
            return part
        if weights is not None:
            raise UsageError("the model has been divided already; give the weights when it is, or load_weights them")
        before = part.inside.__dict__[_DIVISION].arguments
        if part is not module and (now := _arguments(plan, split)) != before:
            raise UsageError(
                f"{type(part.inside).__name__} has been divided already, by {before}, and parallelize got {now}; call "
                "it once, or with the same arguments, or make the model anew"
            )
        return part

    def _planned_and_built(
        self, module: nn.Module, tensors: TensorPlan, split: PipelineSplit, weights: str | os.PathLike[str] | None
    ) -> ShardedModule:
        """This worker's part of a module. An error of the plan leaves the module as it was, on all workers."""
        if self._layout.tensor > 1 or self.shards_weights:
            for parameter, hook in hooked(module.parameters()):
                # torch puts new parameters in place of these, which the hooks would not be called for.
                raise divided_error(parameter, hook)
        plan = plan_model(module, self._settings, self._coordinate, tensors, split)
        blank = f"{plan.deferred} tensors on the meta device"
        check_agreement(self._groups.job, "the model", [*signature(module), blank])
        # Counted, so that two models whose modules have the same names begin with different weights.
        self._drawn += plan.deferred > 0
        return self._builder.build(module, plan, seed=f"{self._seed}/model {self._drawn}", weights=weights)

    def _part_of(self, module: nn.Module) -> ShardedModule | None:
        """The part that a module was divided to; None if it is whole. Raises UsageError if it cannot be used here."""
        division = module.__dict__.get(_DIVISION)
        if division is None:
            return None
        if division.owner is not self or division.part is None or division.part.inside is not module:
            how = "by another strategy" if division.owner is not None else "before it was copied"
            raise UsageError(
                f"{type(module).__name__} holds one worker's part of a model, which was divided {how}; make the model "
                "anew, and divide it once"
            )
        part: ShardedModule = division.part
        return part

    def counted(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """The indices of the parameters that count here for the norm of all: each is counted by one holder."""
        divided = self._divided_ids()
        # Tied weights count on the first stage, and whole ones on the first tensor rank.
        elsewhere = {id(parameter) for parameter in self.tied(parameters)} if self._coordinate.stage else set()
        return frozenset(
            index
            for index, parameter in enumerate(parameters)
            if id(parameter) not in elsewhere and (self._coordinate.tensor == 0 or id(parameter) in divided)
        )

    def kinds(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Says who else holds each parameter: another stage ("tied n"), all tensor ranks ("whole"), nobody ("own")."""
        divided = self._divided_ids()
        tied = {id(parameter): f"tied {number}" for number, parameter in enumerate(self.tied(parameters))}
        return [tied.get(id(parameter), "own" if id(parameter) in divided else "whole") for parameter in parameters]

    def whole(self, parameters: Sequence[nn.Parameter]) -> dict[str, nn.Parameter] | None:
        """By name, the parameters that all tensor ranks hold alike; None if there is one rank."""
        if self._layout.tensor == 1:
            return None
        ids = {id(parameter) for parameter in parameters}
        named = (pair for part in self._parts.values() for pair in part.whole().items())
        return {name: parameter for name, parameter in named if id(parameter) in ids}

    def tied(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that another stage holds too, in an order that is the same there."""
        ids = {id(parameter) for parameter in parameters}
        return [parameter for part in self._parts.values() for parameter in part.tied if id(parameter) in ids]

    def holdings(self, shares_state: bool) -> str:
        """Describes the share of a model's weights in this worker's optimizer; empty if it has all of them."""
        stages, ranks = self._layout.pipeline, self._layout.tensor
        parts = [f"the weights of worker {self._coordinate.stage} of a pipeline (pipeline={stages})"] * (stages > 1)
        parts += [f"1/{ranks} of each divided weight (tensor={ranks})"] * (ranks > 1)
        parts += [f"1/{self._layout.data} of each weight (shard_parameters=True)"] * self.shards_weights
        parts += [f"pieces of weights, about 1/{self._layout.data} of them (shard_optimizer=True)"] * shares_state
        return " and ".join(parts)

    def _divided_ids(self) -> frozenset[int]:
        return frozenset().union(*(part.divided for part in self._parts.values()))


def _on_gpu(device: torch.device, seed: int) -> DeviceRng | None:
    if device.type != "cuda":
        return None
    # Before it torch.cuda.default_generators is empty.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return DeviceRng(lambda: torch.cuda.default_generators[device.index], seed)
