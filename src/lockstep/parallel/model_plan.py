"""How a model is divided, decided as a whole before anything is changed. Pure: no process group is needed.

    whole model, layout of the mesh, settings -> checks, all of them -> ModelPlan -> ``model_build`` carries it out

Nothing of the model is changed here, so that a model that is refused stays as it was, on all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import MeshCoordinate, MeshLayout
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.parallel.pipeline_stage import LayerCut, PipelineSplit, StageCut, check_pipeline_split, tied_ends
from lockstep.parallel.tensor_parallel import ties_of
from lockstep.parallel.tensor_plan import TensorDivision, TensorPlan, plan_tensors
from lockstep.parallel.transformers_plans import HasConfig


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What the plans of all models of one worker have in common. Raises a ConfigError for what does not go together."""

    layout: MeshLayout
    pipelining: PipelineConfig
    shard_parameters: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.shard_parameters and self.layout.pipeline > 1:
            raise ConfigError(
                "shard_parameters=True gathers the weights of each layer for every pass, of which a pipeline makes one "
                "for each microbatch; choose shard_optimizer=True in a pipeline"
            )
        if self.sequence_parallel and self.layout.tensor == 1:
            raise ConfigError(
                "sequence_parallel=True divides sequences among the workers of a layer, and with tensor=1 there is one;"
                " choose tensor=2 or more, or leave it out"
            )

    @property
    def shards_weights(self) -> bool:
        """Whether each replica holds a share of the weights."""
        return self.shard_parameters and self.layout.data > 1


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """How one model is divided, and what of it this worker holds."""

    names: tuple[str, ...]  # of the whole model's state, in its order
    ties: tuple[tuple[str, ...], ...]  # the names of each weight that has several, in the order of ``names``
    stages: tuple[tuple[str, ...], ...]  # the modules of each stage of a pipeline, and tensors outside of these
    weights: frozenset[str]  # those of this worker, whole or a part of each
    # Those that another stage has too, by the first of their names here; the other stage has them in the same order.
    tied: tuple[str, ...]
    tensors: TensorDivision  # of the whole model; a stage has its part of it
    deferred: int  # tensors on the meta device, whose initial values are made when the model is built
    cut: StageCut | None  # cuts the model down to some stages; None without a pipeline
    numbers: tuple[int, ...]  # of this worker's stages; none without a pipeline

    def layers_of(self, stage: int) -> list[str]:
        """The layers of a stage in which tensor ranks divide the sequences, in their order."""
        return [name for name in self.tensors.layers if name in self.stages[stage]]


def plan_model(
    module: nn.Module, settings: PlanSettings, worker: MeshCoordinate, tensors: TensorPlan, split: PipelineSplit
) -> ModelPlan:
    """Plans how a whole module is divided, and what ``worker`` holds; see ``ParallelStrategy.parallelize``.

    Raises a ConfigError if it cannot be divided so.
    """
    pipelining = settings.pipelining
    division = plan_tensors(module, tensors, settings.layout.tensor, sequences=settings.sequence_parallel)
    check_pipeline_split(split)
    if settings.shards_weights:
        _check_shardable(module)
    cut = None if pipelining.workers == 1 else _cut_of(module, split, pipelining)
    stages = () if cut is None else tuple(tuple(cut.held_by(number)) for number in range(pipelining.stages))
    ties, workers = ties_of(module), _weights_by_worker(module, stages, pipelining)
    if not all(workers):
        raise ConfigError(
            f"pipeline_split={split!r} leaves worker {workers.index(set())} of the pipeline without a weight to train; "
            "choose other names or numbers, or fewer stages"
        )
    weights = workers[worker.stage]
    common = [names for names in tied_ends(ties, workers) if not weights.isdisjoint(names)]
    return ModelPlan(
        names=tuple(module.state_dict()),
        ties=tuple(map(tuple, ties)),
        stages=stages,
        weights=frozenset(weights),
        tied=tuple(next(name for name in names if name in weights) for names in common),
        tensors=division,
        deferred=sum(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())),
        cut=cut,
        numbers=() if cut is None else pipelining.stages_of(worker.stage),
    )


def _cut_of(module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig) -> StageCut:
    """Where a model is cut, by its spec or a trace of its forward."""
    if isinstance(module, HasConfig) and (split == "auto" or isinstance(split[0], int)):
        return LayerCut(module, split, pipelining)
    from lockstep.parallel.stage_cut import ModuleGraph  # torch.fx, which few need

    return ModuleGraph(module, split, pipelining)


def _weights_by_worker(
    module: nn.Module, stages: Sequence[Sequence[str]], pipelining: PipelineConfig
) -> list[set[str]]:
    """The names of the weights that each worker of a pipeline has; those that no stage has stay on all of them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    stages_by_root: dict[str, set[int]] = {}
    for number, roots in enumerate(stages):
        for root in roots:
            stages_by_root.setdefault(root, set()).add(number)

    def holders(name: str) -> set[int]:
        while name and name not in stages_by_root:
            name = name.rpartition(".")[0]
        return stages_by_root.get(name, set(range(pipelining.stages)))

    return [
        {name for name in names if not holders(name).isdisjoint(pipelining.stages_of(worker))}
        for worker in range(pipelining.workers)
    ]


def _check_shardable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"{name} is a single number, which cannot be sharded; choose shard_optimizer=True alone")
