"""Carries out the plan of a model on one worker: from here on tensors are sent, and the module is changed in place.

    ModelPlan -> weights of the chief -> sequences -> stages -> tensor ranks -> values -> FSDP -> ShardedModule

Sequences go first, for they wrap the layers that stages wrap again; FSDP shards what tensor ranks have divided.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lockstep.collectives.communicator import Communicator, error_text, raise_gathered_errors
from lockstep.parallel.deferred_init import DeferredInit, materialize, move_to_device
from lockstep.parallel.mesh import WorkerMesh
from lockstep.parallel.model_plan import ModelPlan, PlanSettings
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.pipeline_stage import Stage, StandIn
from lockstep.parallel.pretrained import PretrainedWeights, open_weights
from lockstep.parallel.sharded_module import Receive, ShardedModule
from lockstep.parallel.tensor_parallel import shard_layers
from lockstep.parallel.tensor_plan import WHOLE
from lockstep.parallel.tensor_styles import divide_sequences
from lockstep.parallel.tp_rng import TensorParallelRng


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Builds this worker's parts of models, of which all workers must build the same ones in the same order."""

    settings: PlanSettings
    workers: Communicator  # all of the job
    pipeline: Communicator | None  # the workers of all stages of this replica and tensor rank; None without a pipeline
    mesh: WorkerMesh | None  # None for a single worker
    device: torch.device
    rng: TensorParallelRng
    receive: Receive

    def build(
        self, module: nn.Module, plan: ModelPlan, *, seed: str, weights: str | os.PathLike[str] | None = None
    ) -> ShardedModule:
        """Divides a module in place, with the chief's weights, or those in files. Every worker must call it.

        ``seed`` is that of the initial values of tensors on the meta device. Raises CheckpointError for files that do
        not fit, before anything is changed.
        """
        stored = None if weights is None else open_weights(weights, module, self.workers)
        with torch.no_grad():
            present = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
            self.workers.broadcast("the chief's weights", present)
        initial = DeferredInit(module, seed) if plan.deferred else None
        division = plan.tensors
        if self.mesh is not None and division.layers:
            layers = [plan.layers_of(number) for number in plan.numbers] or [list(division.layers)]
            divide_sequences(self.mesh.mesh["tensor"], module, layers)
        stages = () if plan.cut is None else plan.cut.cut(plan.numbers)
        if self.mesh is not None and division is not WHOLE:
            modules = dict(module.named_modules(remove_duplicate=False))
            division = division.within({name for name, part in modules.items() if not isinstance(part, StandIn)})
            shard_layers(module, division, self.mesh.mesh["tensor"])
        self._fill(partial(materialize, module, initial, division.orders, self.device), stored)
        self.rng.apply_to(module, division.rank_rng, division.common_rng)
        if self.mesh is not None and self.settings.shards_weights:
            from lockstep.parallel.fsdp import shard_fully  # torch's FSDP, which few ask for

            shard_fully(module, self.mesh.mesh["data"])
        # After FSDP, which has moved the parameters that it shards, unit by unit.
        move_to_device(module, self.device)
        return ShardedModule(module, plan, division.orders, pipeline=self._pipeline(stages), receive=self.receive)

    def _fill(self, fill: partial[None], stored: PretrainedWeights | None) -> None:
        """Gives this worker's tensors their values, if they have none or are in files. Every worker must call it."""
        if stored is None:
            fill()
        else:
            raise_gathered_errors(self.workers, "the weights", error_text(lambda: fill(stored)))

    def _pipeline(self, stages: Sequence[Stage]) -> Pipeline | None:
        if self.pipeline is None or self.mesh is None:
            return None
        group = self.mesh.mesh.get_group("pipeline")
        return Pipeline(stages, self.settings.pipelining, group=group, workers=self.pipeline, device=self.device)
