"""The states of models that are divided among workers, and of their optimizers: each worker gives and takes its own.

    worker: its boxes of weights, of exp_avg, ...  ->  files of its own, under the plain names
    any layout: files, whole or in boxes           ->  the boxes that its workers hold

What is no tensor, and which parameter has which number, is told to all; so the chief's record is that of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep._torch_compat import tree_map
from lockstep.checkpoint.format import SHARED, STATE, TensorRef
from lockstep.checkpoint.sharded_io import TensorReader, TensorShard
from lockstep.checkpoint.state_adapters import (
    AdapterState,
    SavedState,
    StateAdapter,
    by_name,
    check_class,
    check_state,
    kind_of,
    on_everyone,
)
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.kernels import HeldState
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.parallel.regions import Region
from lockstep.parallel.sharded_module import ShardedModule


class ShardedModuleAdapter(StateAdapter):
    """A module of which this worker holds a part.

    Args:
        module: mirrored.
        workers: all that save and restore together.
    """

    def __init__(self, module: MirroredModule, workers: Communicator) -> None:
        self._module, self._part, self._workers = module, sharded_module_of(module), workers.processes
        self._stored: TensorReader | None = None

    def state(self) -> AdapterState:
        """What this worker holds of the weights; buffers are averaged in it, and each worker's own beside it."""
        self._module.exchange_buffers()
        averages = dict(self._module.named_buffers())
        regions = self._part.regions()
        tensors = {name: averages.get(name, tensor) for name, tensor in self._part.own_tensors().items()}
        return AdapterState(
            shared={},
            worker={name: buffer for name, buffer in self._part.named_buffers() if buffer.is_floating_point()},
            weight_shards={name: TensorShard(tensor, regions[name]) for name, tensor in tensors.items()},
        )

    def check(self, saved: SavedState) -> None:
        """The keys must be the whole model's, and the shapes those of what is held here. Every worker must call it."""
        on_everyone(self._workers, "weights looked at", lambda: self._look(saved))

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
        """Reads what this worker holds. Every worker must call it."""
        regions, stored = self._part.regions(), self._stored
        held = {name: TensorShard(tensor, regions[name]) for name, tensor in self._part.own_tensors().items()}
        on_everyone(self._workers, "weights read", lambda: None if stored is None else stored.read(held))
        self._stored = None
        if saved.same_layout and isinstance(saved.worker, Mapping):
            for name, buffer in self._part.named_buffers():
                if name in saved.worker:
                    buffer.copy_(saved.worker[name])

    def _look(self, saved: SavedState) -> None:
        if saved.weights_in is None:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} no weights; give things their names of before"
            )
        path = Path(saved.source) / saved.weights_in
        self._stored = TensorReader(_seen(path))
        found = self._stored.tensors
        own = {name: torch.empty(region.whole, device="meta") for name, region in self._part.regions().items()}
        check_fit(found, {name: own.get(name, found.get(name)) for name in self._part.names}, path)


class ShardedOptimizerAdapter(StateAdapter):
    """An optimizer over parts of models.

    Args:
        name: of this part, which begins the keys of its tensors.
        optimizer: mirrored.
        modules: the mirrored modules whose parameters it updates, by what their names begin with.
        workers: all that save and restore together.

    Raises:
        ConfigError: a parameter of another module.
    """

    def __init__(
        self, name: str, optimizer: MirroredOptimizer, modules: Mapping[str, MirroredModule], workers: Communicator
    ) -> None:
        self._name, self._optimizer, self._workers = name, optimizer, workers.processes
        self._names: dict[int, str] = {}
        self._regions: dict[int, Region] = {}
        self._order: dict[str, int] = {}
        for prefix, module in modules.items():
            self._add(prefix, sharded_module_of(module))
        if any(id(each) not in self._names for group in optimizer.param_groups for each in group["params"]):
            raise ConfigError(
                f"Checkpoint({name}=...) got the optimizer of a model that it did not get; give it the model too: "
                "Checkpoint(model=model, optimizer=optimizer)"
            )
        self._stored: TensorReader | None = None

    def state(self) -> AdapterState:
        """As one device would give it, its tensors held by the workers that step them. Every worker must call it."""
        groups = [[self._names[id(each)] for each in group["params"]] for group in self._optimizer.param_groups]
        held, described = self._held_state()
        everyones = all_gather_object(self._workers, "the optimizer's state", {"groups": groups, "state": described})
        names = [
            sorted({name for theirs in everyones for name in theirs["groups"][number]}, key=self._order.__getitem__)
            for number in range(len(groups))
        ]
        return AdapterState(
            shared={
                "kind": kind_of(self._optimizer),
                "names": names,
                "state": self._whole_state(names, [theirs["state"] for theirs in everyones]),
            },
            held=held,
        )

    def check(self, saved: SavedState) -> None:
        """Class, groups and names must be those of before. Every worker must call it."""
        check_state(saved.shared, self._optimizer)
        on_everyone(self._workers, "the optimizer's state looked at", lambda: self._look(saved))

    def load(self, saved: SavedState) -> None:
        """Reads what this worker keeps of it. Every worker must call it."""
        on_everyone(self._workers, "the optimizer's state read", lambda: self._read(saved))
        self._stored = None

    def _add(self, prefix: str, part: ShardedModule) -> None:
        regions = part.regions()
        for name, parameter in part.named_parameters():
            self._names[id(parameter)] = f"{prefix}{part.first_name(name)}"
            self._regions[id(parameter)] = regions[name]
        for name in part.names:
            self._order[f"{prefix}{name}"] = len(self._order)

    def _held_state(self) -> tuple[dict[str, TensorShard], dict[str, dict[str, Any]]]:
        """What this worker keeps: tensors by their keys, and by parameter and name what stands for each value."""
        held: dict[str, TensorShard] = {}
        described: dict[str, dict[str, Any]] = {}
        for each in self._optimizer.held_state():
            name = self._names[id(each.parameter)]
            for slot, value in each.values.items():
                plain: Any = value
                if isinstance(value, torch.Tensor):
                    plain = {"tensor": f"{self._name}.{SHARED}.{name}.{slot}"}
                    held[plain["tensor"]] = self._held(each, value)
                described.setdefault(name, {})[slot] = plain
        return held, described

    def _held(self, each: HeldState, value: torch.Tensor) -> TensorShard:
        if value.ndim and value.shape == each.part.shape:
            return TensorShard(value, self._regions[id(each.parameter)], start=each.start)
        return TensorShard(value)

    def _whole_state(self, names: Sequence[Sequence[str]], everyones: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state_dict of one device's optimizer, with what stands for the tensors in their places."""
        found = {name: values for theirs in reversed(everyones) for name, values in theirs.items()}
        numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
        return {
            "state": {
                number: {
                    slot: TensorRef(value["tensor"]) if isinstance(value, dict) else value
                    for slot, value in found[name].items()
                }
                for name, number in numbers.items()
                if name in found
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in own]}
                for group, own in zip(self._optimizer.param_groups, names, strict=True)
            ],
        }

    def _look(self, saved: SavedState) -> None:
        check_class(saved, self._optimizer)
        names, groups = saved.shared.get("names"), self._optimizer.param_groups
        if names is None:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} a state without the names of its parameters; save it anew "
                "with this version, with the model beside it"
            )
        for own, there in zip(groups, names, strict=True):
            missing = [name for name in (self._names[id(each)] for each in own["params"]) if name not in set(there)]
            if missing:
                raise CheckpointError(
                    f"{saved.source} has for {saved.name!r} nothing about {missing[0]}; make the optimizer as it was "
                    "when that was saved"
                )
        self._stored = TensorReader(_seen(Path(saved.source) / STATE))

    @torch.no_grad()
    def _read(self, saved: SavedState) -> None:
        stored, values = self._stored, by_name(saved.shared)
        if stored is None:
            return
        wanted: dict[str, TensorShard] = {}
        held = [self._blank(each, values, stored, wanted) for each in self._optimizer.held_state()]
        stored.read(wanted)
        groups = tree_map(lambda each: _read_now(each, stored), saved.shared["state"]["param_groups"])
        for own, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({name: value for name, value in theirs.items() if name != "params"})
        self._optimizer.take_held_state(held)

    def _blank(
        self,
        each: HeldState,
        values: Mapping[str, Mapping[str, Any]],
        stored: TensorReader,
        wanted: dict[str, TensorShard],
    ) -> HeldState:
        """What to keep of the state for one parameter; its tensors are without values, and put into ``wanted``."""
        region, found = self._regions[id(each.parameter)], {}
        for slot, value in values.get(self._names[id(each.parameter)], {}).items():
            found[slot] = value
            if not isinstance(value, TensorRef):
                continue
            there = stored.tensors[value.key]
            divided = bool(there.shape) and tuple(there.shape) == region.whole
            # As Optimizer.load_state_dict has it.
            dtype = each.part.dtype if each.part.is_floating_point() and slot != "step" else there.dtype
            found[slot] = torch.empty(each.part.shape if divided else there.shape, dtype=dtype)
            key_region = region if divided else None
            wanted[value.key] = TensorShard(found[slot], key_region, start=each.start if divided else 0)
        return HeldState(parameter=each.parameter, start=each.start, part=each.part, values=found)


def sharded_module_of(module: MirroredModule) -> ShardedModule:
    """This worker's part."""
    part: nn.Module = module.module
    if not isinstance(part, ShardedModule):
        raise ConfigError(f"a {type(part).__name__} is no part of a model; divide it with strategy.parallelize")
    return part


def _seen(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"does not see {path}, which the chief does; keep checkpoints of a model that is divided among workers in "
            "a folder that all of them share"
        )
    return path


def _read_now(value: Any, stored: TensorReader) -> Any:
    return stored.read_whole(value.key) if isinstance(value, TensorRef) else value
