"""The parts of models that the workers of a grid hold: how a module becomes them, and what may step them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.collectives.agreement import agree
from lockstep.collectives.values import exchange_values
from lockstep.collectives.workers import Workers
from lockstep.errors import ConfigError
from lockstep.mirroring.holding import Holding, Pipelined
from lockstep.mirroring.mirror import signature
from lockstep.mirroring.updaters import ELEMENTWISE
from lockstep.parallel.draws import OwnDraws
from lockstep.parallel.mesh import GridMesh
from lockstep.parallel.microbatches import Pipelining
from lockstep.parallel.part import PartModule
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.stage import PipelineSplit, Stage, cut
from lockstep.parallel.tensor_plan import TensorPlan, divide_layers, ties_of
from lockstep.strategies.teams import Teams


class ModelParts(Holding):
    """This worker's parts of models.

    Args:
        teams: the workers.
        mesh: of all; None where there is one worker.
        pipelining: how pipelines run.
        own: the generator from which this worker draws for what it alone holds.
    """

    def __init__(
        self,
        teams: Teams,
        mesh: GridMesh | None,
        *,
        pipelining: Pipelining,
        own: torch.Generator,
    ) -> None:
        self._teams, self._grid, self._place, self._mesh = teams, teams.grid, teams.place, mesh
        self._pipelining = pipelining
        self._draws = OwnDraws(own)
        self._parts: WeakValueDictionary[int, PartModule] = WeakValueDictionary()

    def peers(self, workers: Workers) -> Workers:
        """Those with the same part, one per replica."""
        return self._teams.peers

    def take(self, module: nn.Module) -> nn.Module:
        """This worker's part; of a plain module that by "auto"."""
        return module if isinstance(module, PartModule) else self.divide(module, "auto", "auto")

    @property
    def parts(self) -> bool:
        """Where there are several workers."""
        return self._mesh is not None

    def pipeline(self, module: nn.Module) -> Pipelined | None:
        """The schedules of a part that is one stage of several."""
        return module.pipeline if isinstance(module, PartModule) else None

    def check(self, optimizer: Optimizer) -> None:
        """Only what updates each number by itself gives on parts what it gives on the whole."""
        if type(optimizer) not in ELEMENTWISE:
            known = ", ".join(each.__name__ for each in ELEMENTWISE)
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}, which may look at whole weights, and a worker holds "
                f"parts; choose one of torch's {known}"
            )

    def divide(self, module: nn.Module, plan: TensorPlan, split: PipelineSplit) -> PartModule:
        """Divides a module, once. Every worker must call it.

        Raises:
            ConfigError: it cannot be divided so.
            ClusterError: another worker has another module.
        """
        if isinstance(module, PartModule):
            return module
        part = self._parts.get(id(module))
        if part is None:
            part = self._parts[id(module)] = self._divided(module, plan, split)
        return part

    def counted(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """The numbers of those that count here for the norm of all: one's own share, and once what several hold."""
        divided = self._divided_ids()
        elsewhere = {id(each) for each in self.tied(parameters)} if self._place.stage else set()
        return frozenset(
            index
            for index, each in enumerate(parameters)
            if id(each) not in elsewhere and (self._place.tensor == 0 or id(each) in divided)
        )

    def kinds(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        """Of each, with whom else this worker has it in common: with another stage, with tensor ranks, or with none."""
        divided = self._divided_ids()
        tied = {id(each): f"tied {number}" for number, each in enumerate(self.tied(parameters))}
        return [tied.get(id(each), "own" if id(each) in divided else "whole") for each in parameters]

    def tied(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those that another stage holds too, in an order that is the same there."""
        given = {id(each) for each in parameters}
        return [each for part in self._parts.values() for each in part.tied if id(each) in given]

    def _divided_ids(self) -> frozenset[int]:
        return frozenset().union(*(part.divided for part in self._parts.values()))

    def _divided(self, module: nn.Module, plan: TensorPlan, split: PipelineSplit) -> PartModule:
        agree(self._teams.job, "the model", signature(module))
        with torch.no_grad():
            self._teams.job.broadcast("the chief's weights", [*module.parameters(), *module.buffers()])
        if self._mesh is None:
            return PartModule(module)
        names, ties = list(module.state_dict()), ties_of(module)
        stage = cut(module, split, self._grid.pipeline, self._place.stage) if self._grid.pipeline > 1 else None
        division = divide_layers(module, plan, self._mesh.mesh["tensor"])
        self._draws.give(module, division.apart, division.together)
        if stage is None:
            return PartModule(module, division, names=names)
        return PartModule(
            module,
            division,
            names=names,
            line=self._teams.line,
            tied=self._tied_of(module, ties),
            pipeline=self._pipeline_of(module, stage, self._mesh),
        )

    def _pipeline_of(self, module: nn.Module, stage: Stage, mesh: GridMesh) -> Pipeline:
        config: Any = module.config
        return Pipeline(
            stage,
            number=self._place.stage,
            stages=self._grid.pipeline,
            group=mesh.mesh.get_group("pipeline"),
            pipelining=self._pipelining,
            hidden=int(config.hidden_size),
            dtype=next(parameter.dtype for parameter in module.parameters()),
        )

    def _tied_of(self, module: nn.Module, ties: Sequence[Sequence[str]]) -> list[str]:
        """The first of its names here of each weight that another stage holds too."""
        line = self._teams.line
        own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        stages = [] if line is None else exchange_values(line, "the names of the stages", sorted(own))
        found = []
        for names in ties:
            holders = [number for number, held in enumerate(stages) if set(held) & set(names)]
            if len(holders) < 2:
                continue
            if holders != [0, len(stages) - 1]:
                raise ConfigError(
                    f"{' and '.join(names)} are one weight, which the stages {holders} hold, and a pipeline shares "
                    "weights between its first and its last stage only; choose another split"
                )
            found += [name for name in names if name in own][:1]
        return found
