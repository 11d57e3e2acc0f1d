"""State adapters of models that are divided among workers, and of their optimizers.

    save:     worker: its boxes of weights, of exp_avg, ...  ->  its own files, under the plain model's names
    restore:  files of any layout, whole or in boxes         ->  the boxes that each worker holds

Everything that is not a tensor, and the numbers of the parameters, are gathered, so the chief's record is that of one
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep._torch_compat import tree_map
from lockstep.checkpoint.format import SHARED, STATE, TensorRef, TensorsOrRefs, flatten, unflatten
from lockstep.checkpoint.state_adapters import (
    AdapterState,
    SavedState,
    StateAdapter,
    by_name,
    check_optimizer,
    class_name,
)
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.optim.storage_optimizers import StatePart
from lockstep.parallel.regions import Region
from lockstep.parallel.sharded_module import ShardedModule
from lockstep.parallel.tensor_files import TensorReader, TensorShard


class ShardedModuleAdapter(StateAdapter):
    """A module of which each worker holds a part. Its buffers are averaged in the weights and saved per worker too."""

    def __init__(self, module: MirroredModule) -> None:
        self._module, self._part = module, sharded_module_of(module)

    def state(self) -> AdapterState:
        self._module.exchange_buffers()
        averages = dict(self._module.named_buffers())
        tensors = {name: averages.get(name, tensor) for name, tensor in self._part.local_tensors().items()}
        return AdapterState(
            shared={},
            worker=dict(self._part.named_buffers()),
            weight_shards=self._shards(tensors),
        )

    def check(self, entry: SavedState) -> None:
        """The keys must be the whole model's, and the shapes those of what this worker holds."""
        self._open(entry)

    @torch.no_grad()
    def load(self, entry: SavedState) -> None:
        self._open(entry).read(self._shards(self._part.local_tensors()))
        if entry.same_layout and isinstance(entry.worker, Mapping):
            for name, buffer in self._part.named_buffers():
                if name in entry.worker:
                    buffer.copy_(entry.worker[name])

    def _shards(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorShard]:
        regions = self._part.regions()
        return {name: TensorShard(tensor, regions[name]) for name, tensor in tensors.items()}

    def _open(self, entry: SavedState) -> TensorReader:
        if entry.weights_in is None:
            raise CheckpointError(
                f"{entry.source} has no weights for {entry.name!r}; give the things the names they were saved under"
            )
        path = Path(entry.source) / entry.weights_in
        reader = TensorReader(_visible(path))
        saved = reader.tensors
        shapes = {name: torch.empty(region.whole, device="meta") for name, region in self._part.regions().items()}
        check_fit(saved, {name: shapes.get(name, saved.get(name)) for name in self._part.names}, path)
        return reader


class ShardedOptimizerAdapter(StateAdapter):
    """An optimizer over parts of models. Its state is saved as one device would save it, its tensors in shards.

    The keys of its tensors begin with its ``name``; ``modules`` are those whose parameters it updates, by the prefix of
    their parameters' names. Raises ConfigError if it updates a parameter of another module.
    """

    def __init__(
        self, name: str, optimizer: MirroredOptimizer, modules: Mapping[str, MirroredModule], workers: Communicator
    ) -> None:
        self._name, self._optimizer, self._workers = name, optimizer, workers.processes
        self._names: dict[int, str] = {}  # id of a parameter -> its name in the whole model
        self._regions: dict[int, Region] = {}
        self._order: dict[str, int] = {}
        for prefix, module in modules.items():
            part = sharded_module_of(module)
            regions = part.regions()
            for own_name, parameter in part.named_parameters():
                self._names[id(parameter)] = f"{prefix}{part.first_name(own_name)}"
                self._regions[id(parameter)] = regions[own_name]
            for whole_name in part.names:
                self._order[f"{prefix}{whole_name}"] = len(self._order)
        if any(id(parameter) not in self._names for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"Checkpoint({name}=...) got the optimizer of a model that it did not get; give it the model too: "
                "Checkpoint(model=model, optimizer=optimizer)"
            )

    def state(self) -> AdapterState:
        groups = [
            [self._names[id(parameter)] for parameter in group["params"]] for group in self._optimizer.param_groups
        ]
        shards, values = self._own_state()
        local = {"groups": groups, "state": flatten(values)[0]}
        gathered = all_gather_object(self._workers, "the optimizer's state", local)
        # From the last worker to the first: where several have a parameter, the value of the first one stays.
        values_by_name = {
            name: value for worker_state in reversed(gathered) for name, value in worker_state["state"].items()
        }
        names = [
            sorted(
                {name for worker_state in gathered for name in worker_state["groups"][number]},
                key=self._order.__getitem__,
            )
            for number in range(len(groups))
        ]
        numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
        refs = TensorsOrRefs()
        state = {
            number: unflatten(values_by_name[name], refs) for name, number in numbers.items() if name in values_by_name
        }
        param_groups = [
            {**group, "params": [numbers[name] for name in group_names]}
            for group, group_names in zip(self._optimizer.param_groups, names, strict=True)
        ]
        return AdapterState(
            shared={
                "kind": class_name(self._optimizer),
                "names": names,
                "state": {"state": state, "param_groups": param_groups},
            },
            shards=shards,
        )

    def check(self, entry: SavedState) -> None:
        """The class, the groups and the names must be the optimizer's."""
        self._open(entry)

    def _own_state(self) -> tuple[dict[str, TensorShard], dict[str, dict[str, Any]]]:
        """The tensors that this worker holds, by key; and by parameter and slot the value, or its tensor's reference.

        A tensor of a parameter's shape is divided as the parameter is.
        """
        shards: dict[str, TensorShard] = {}
        values: dict[str, dict[str, Any]] = {}
        for held_state in self._optimizer.storages.state_parts():
            name = self._names[id(held_state.parameter)]
            for slot, value in held_state.values.items():
                plain: Any = value
                if isinstance(value, torch.Tensor):
                    plain = TensorRef(f"{self._name}.{SHARED}.{name}.{slot}")
                    divided = value.ndim and value.shape == held_state.part.shape
                    region = self._regions[id(held_state.parameter)] if divided else None
                    shards[plain.key] = TensorShard(value, region, start=held_state.start if divided else 0)
                values.setdefault(name, {})[slot] = plain
        return shards, values

    def _open(self, entry: SavedState) -> TensorReader:
        check_optimizer(entry, self._optimizer)
        names = entry.shared.get("names")
        if names is None:
            raise CheckpointError(
                f"{entry.source} has for {entry.name!r} a state without the names of its parameters; save it anew, "
                "with the model beside it"
            )
        for group, saved_names in zip(self._optimizer.param_groups, names, strict=True):
            saved_set = set(saved_names)
            missing = [name for parameter in group["params"] if (name := self._names[id(parameter)]) not in saved_set]
            if missing:
                raise CheckpointError(
                    f"{entry.source} has for {entry.name!r} nothing about {missing[0]}; make the optimizer as it was "
                    "when that was saved"
                )
        return TensorReader(_visible(Path(entry.source) / STATE))

    @torch.no_grad()
    def load(self, entry: SavedState) -> None:
        reader, values = self._open(entry), by_name(entry.shared)
        shards: dict[str, TensorShard] = {}
        states = [
            self._blank(held_state, values, reader, shards) for held_state in self._optimizer.storages.state_parts()
        ]
        reader.read(shards)
        groups = tree_map(
            lambda value: reader.read_whole(value.key) if isinstance(value, TensorRef) else value,
            entry.shared["state"]["param_groups"],
        )
        for group, saved_group in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        self._optimizer.storages.set_state_parts(states)

    def _blank(
        self,
        held_state: StatePart,
        values: Mapping[str, Mapping[str, Any]],
        reader: TensorReader,
        shards: dict[str, TensorShard],
    ) -> StatePart:
        """The state to keep for one parameter, with empty tensors, which are added to ``shards``."""
        region = self._regions[id(held_state.parameter)]
        slots = dict(values.get(self._names[id(held_state.parameter)], {}))
        for slot, value in slots.items():
            if isinstance(value, TensorRef):
                info = reader.tensors[value.key]
                divided = bool(info.shape) and tuple(info.shape) == region.whole
                # The same dtype as Optimizer.load_state_dict gives.
                dtype = held_state.part.dtype if held_state.part.is_floating_point() and slot != "step" else info.dtype
                slots[slot] = torch.empty(held_state.part.shape if divided else info.shape, dtype=dtype)
                shards[value.key] = TensorShard(
                    slots[slot], region if divided else None, start=held_state.start if divided else 0
                )
        return StatePart(parameter=held_state.parameter, start=held_state.start, part=held_state.part, values=slots)


def sharded_module_of(module: MirroredModule) -> ShardedModule:
    """Returns this worker's part of a divided model."""
    part: nn.Module = module.module
    if not isinstance(part, ShardedModule):
        raise ConfigError(f"a {type(part).__name__} is not a part of a model; divide it with strategy.parallelize")
    return part


def _visible(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(
            f"does not see {path}, which the chief does; keep checkpoints of a model that is divided among workers in "
            "a folder that all of them share"
        )
    return path
