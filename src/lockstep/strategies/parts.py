"""The parts of models that the workers of a grid hold: how a module becomes them, and what may step them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.collectives.communicator import Workers, agree, exchange_values
from lockstep.errors import ConfigError
from lockstep.mirroring.holding import Holding, Pipelined
from lockstep.mirroring.mirror import signature
from lockstep.mirroring.updaters import ELEMENTWISE
from lockstep.parallel.deferred_init import FirstWeights, fill, place
from lockstep.parallel.mesh import GridMesh
from lockstep.parallel.model_specs import known_family
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.pipeline_config import Pipelining
from lockstep.parallel.pipeline_stage import PipelineSplit, Stage, cut
from lockstep.parallel.sequence_parallel import DividedSequences
from lockstep.parallel.sharded_module import PartModule
from lockstep.parallel.tensor_parallel import WHOLE, Division, Names, TensorPlan, divide_layers, ties_of
from lockstep.parallel.tp_rng import DeviceDraws, OwnDraws
from lockstep.strategies.teams import Teams

if TYPE_CHECKING:
    from lockstep.parallel.fsdp import Borrowing


class ModelParts(Holding):
    """This worker's parts of models.

    Args:
        teams: the workers.
        mesh: of all; None where there is one worker.
        pipelining: how pipelines run.
        shard_parameters: whether each replica holds a share of the weights.
        own: the generator from which this worker draws for what it alone holds.
        device: of this worker.
        sequence_parallel: whether tensor ranks divide, along the sequence, what they would all hold alike.
        seed: from which the first weights of models on the meta device are drawn; the same on every worker.
    """

    def __init__(
        self,
        teams: Teams,
        mesh: GridMesh | None,
        *,
        pipelining: Pipelining,
        shard_parameters: bool,
        own: torch.Generator,
        device: torch.device,
        seed: int,
        sequence_parallel: bool = False,
    ) -> None:
        self._teams, self._grid, self._place, self._mesh = teams, teams.grid, teams.place, mesh
        self._pipelining = pipelining
        self._shard_parameters = shard_parameters and teams.grid.data > 1
        self._device = device
        self._draws = OwnDraws(own, _on_gpu(device, own.initial_seed()))
        self._seed, self._drawn = seed, 0
        self._sequence_parallel = sequence_parallel
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

    @property
    def shares_weights(self) -> bool:
        """Where they are divided among several replicas."""
        return self._shard_parameters

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

    @property
    def draws(self) -> OwnDraws:
        """What this worker draws by itself."""
        return self._draws

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
        first = self._first_weights(module)
        if self._mesh is None:
            _fill(module, first, WHOLE, self._device)
            place(module, self._device)
            return PartModule(module)
        names, ties = list(module.state_dict()), ties_of(module)
        sequences = self._sequences_of(module, plan, self._mesh)
        stages = cut(module, split, self._pipelining, self._place.stage) if self._grid.pipeline > 1 else ()
        division = divide_layers(module, plan, self._mesh.mesh["tensor"], sequences=sequences is not None)
        if sequences is not None:
            sequences.bound([stage.parts for stage in stages] or [module.modules()])
        _fill(module, first, division, self._device)
        self._draws.give(module, division.apart, division.together)
        borrowing = self._shared(module, stages, self._mesh) if self._shard_parameters else None
        place(module, self._device)  # after torch has moved what it shares, layer by layer
        if not stages:
            return PartModule(module, division, names=names, ties=ties)
        return PartModule(
            module,
            division,
            names=names,
            ties=ties,
            line=self._teams.line,
            tied=self._tied_of(module, ties),
            pipeline=self._pipeline_of(module, stages, self._mesh, borrowing),
        )

    def _shared(self, module: nn.Module, stages: Sequence[Stage], mesh: GridMesh) -> Borrowing | None:
        """Leaves this worker its share; and how its stages have the rest, where there are any."""
        from lockstep.parallel.fsdp import (
            shard_fully,  # torch's FSDP, which few ask for
            share_stages,
        )

        if stages:
            return share_stages(module, stages, self._pipelining, mesh.mesh["data"])
        shard_fully(module, mesh.mesh["data"])
        return None

    def _first_weights(self, module: nn.Module) -> FirstWeights | None:
        """How the tensors on the meta device begin; those elsewhere become the chief's. None where all are there."""
        tensors = [*module.parameters(), *module.buffers()]
        there = [each for each in tensors if not each.is_meta]
        blank = f"{len(tensors) - len(there)} tensors on the meta device"
        agree(self._teams.job, "the model", [*signature(module), blank])
        with torch.no_grad():
            self._teams.job.broadcast("the chief's weights", there)
        if len(there) == len(tensors):
            return None
        self._drawn += 1  # so that two models whose modules have the same names begin with different weights
        return FirstWeights(module, f"{self._seed}/model {self._drawn}")

    def _sequences_of(self, module: nn.Module, plan: TensorPlan, mesh: GridMesh) -> DividedSequences | None:
        """How the layers divide the sequences; before the cut, whose turns go around what is done here."""
        if not self._sequence_parallel:
            return None
        if plan != "auto":
            raise ConfigError(
                'sequence_parallel=True goes with tensor_plan="auto"; leave it out, and name torch\'s SequenceParallel '
                "in your plan"
            )
        names = Names(module, known_family(module, "sequence_parallel=True"))
        return DividedSequences(mesh.mesh["tensor"], module, names.layers())

    def _pipeline_of(
        self, module: nn.Module, stages: Sequence[Stage], mesh: GridMesh, borrowing: Borrowing | None
    ) -> Pipeline:
        config: Any = module.config
        return Pipeline(
            stages,
            self._pipelining,
            group=mesh.mesh.get_group("pipeline"),
            hidden=int(config.hidden_size),
            dtype=next(parameter.dtype for parameter in module.parameters()),
            device=self._device,
            borrowing=borrowing,
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


def _fill(module: nn.Module, first: FirstWeights | None, division: Division, device: torch.device) -> None:
    if first is not None:
        fill(module, first, division.orders, device)


def _on_gpu(device: torch.device, own: int) -> DeviceDraws | None:
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before it there are no generators
    return DeviceDraws(lambda: torch.cuda.default_generators[device.index], own)
