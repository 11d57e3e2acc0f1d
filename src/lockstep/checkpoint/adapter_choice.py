"""Which adapter gives and takes the state of a thing in a Checkpoint: by what the thing is."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.state_adapters import (
    ModuleAdapter,
    Names,
    OptimizerAdapter,
    PlainAdapter,
    StateAdapter,
    VariableAdapter,
)
from lockstep.collectives.communicator import Communicator
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.errors import ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, gradient scaler, metric, plain module, or anything else with these two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def adapter_for(name: str, thing: Any, modules: Mapping[str, MirroredModule], workers: Communicator) -> StateAdapter:
    """Returns the adapter for one thing given to a Checkpoint, with the mirrored modules among all of them, by name.

    Raises ConfigError if the thing has no state that can be restored in place.
    """
    if isinstance(thing, StateAdapter):
        return thing
    # The sharded adapters are imported late: it takes 1.3 s, which a program that divides no model need not wait.
    if isinstance(thing, MirroredModule):
        if not thing.is_part:
            return ModuleAdapter(thing)
        from lockstep.checkpoint.sharded_state import ShardedModuleAdapter

        return ShardedModuleAdapter(thing)
    if isinstance(thing, Optimizer):
        # Modules by the prefix of their parameters' names, so that no two parameters have one name.
        modules_by_prefix = {"" if len(modules) == 1 else f"{key}.": module for key, module in modules.items()}
        is_sharded = workers.layout or any(module.is_part for module in modules.values())
        if not (is_sharded and isinstance(thing, MirroredOptimizer)):
            return OptimizerAdapter(thing, _names_of(thing, modules_by_prefix))
        from lockstep.checkpoint.sharded_state import ShardedOptimizerAdapter

        return ShardedOptimizerAdapter(name, thing, modules_by_prefix, workers)
    if isinstance(thing, MirroredVariable):
        return VariableAdapter(thing)
    if isinstance(thing, torch.Generator):
        return PlainAdapter("Generator", thing.get_state, thing.set_state, per_worker=True)
    if isinstance(thing, MutableMapping):
        return PlainAdapter("dict", lambda: dict(thing), thing.update)  # values not saved stay
    if isinstance(thing, Stateful):
        is_data = isinstance(thing, DistributedIterable)  # of which each worker may read a part of its own
        return PlainAdapter(type(thing).__name__, thing.state_dict, thing.load_state_dict, per_worker=is_data)
    raise ConfigError(
        f"Checkpoint({name}={thing!r}) cannot be restored in place; give a mirrored module or optimizer, a scheduler, "
        "a strategy.variable, a dict of plain values, or anything with state_dict and load_state_dict"
    )


def _names_of(optimizer: Optimizer, modules: Mapping[str, MirroredModule]) -> Names | None:
    """The names of an optimizer's parameters; None if one of them belongs to none of the modules."""
    names_by_id = {
        id(parameter): f"{prefix}{name}"
        for prefix, module in modules.items()
        for name, parameter in module.module.named_parameters()
    }
    names = [[names_by_id.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return names if all(name for group in names for name in group) else None
