"""The part for each thing that a checkpoint is given, and those of plain things: schedulers, values, generators."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.kinds import check_kind, check_like
from lockstep.checkpoint.mirrored_parts import ModulePart, OptimizerPart, VariablePart
from lockstep.checkpoint.optimizer_names import names_of, prefixed
from lockstep.checkpoint.part import Part, PartState, SavedPart
from lockstep.collectives.communicator import Workers
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be taken and given back: schedulers, gradient scalers, metrics, plain modules."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StatefulPart(Part):
    """Anything with ``state_dict`` and ``load_state_dict``, equal on all workers."""

    def __init__(self, thing: Stateful) -> None:
        self._thing = thing

    def state(self) -> PartState:
        """Its state_dict, and its class."""
        return PartState(shared={"kind": type(self._thing).__name__, "state": self._thing.state_dict()})

    def check(self, saved: SavedPart) -> None:
        """It must be of the same class, and a scheduler's or scaler's values of the kinds that it has now."""
        check_kind(saved.shared, {"kind": str, "state": dict}, "state")
        kind, ours = saved.shared["kind"], type(self._thing).__name__
        if kind != ours:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} the state of a {kind}, but it is a {ours}; "
                "make it as it was when that was saved"
            )
        torchs = type(self._thing).__module__.startswith("torch.")  # another's values may change in kind
        if torchs and isinstance(self._thing, (LRScheduler, torch.amp.GradScaler)):
            check_like(saved.shared["state"], self._thing.state_dict(), "state")

    def load(self, saved: SavedPart) -> None:
        """Hands the state over."""
        self._thing.load_state_dict(saved.shared["state"])


class ValuesPart(Part):
    """A dict of plain values, such as ``{"epoch": 0, "step": 0}``, restored in place."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state(self) -> PartState:
        """The values."""
        return PartState(shared=dict(self._values))

    def check(self, saved: SavedPart) -> None:
        """Any values fit."""
        check_kind(saved.shared, dict, "values")

    def load(self, saved: SavedPart) -> None:
        """Puts the saved values into the dict; others that it holds stay."""
        self._values.update(saved.shared)


class GeneratorPart(Part):
    """A ``torch.Generator``, each worker's own."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state(self) -> PartState:
        """Its state."""
        return PartState(worker=self._generator.get_state())

    def check(self, saved: SavedPart) -> None:
        """Every state of a generator fits, until it is set."""
        check_kind(saved.workers, list[torch.Tensor], "state")

    def load(self, saved: SavedPart) -> None:
        """Sets it; on another layout to the chief's."""
        self._generator.set_state(saved.worker)


def part_of(name: str, thing: Any, modules: Mapping[str, MirroredModule], workers: Workers) -> Part:
    """The part for one thing given to a Checkpoint.

    Args:
        name: of the thing.
        thing: the thing.
        modules: the mirrored modules among all things, by name.
        workers: all that save and restore together.

    Raises:
        ConfigError: a thing without a state that can be given back to it.
    """
    if isinstance(thing, Part):
        return thing
    if isinstance(thing, MirroredModule):
        return _divided_module(thing, workers) if thing.is_part else ModulePart(thing)
    if isinstance(thing, Optimizer):
        named = prefixed(modules)
        if isinstance(thing, MirroredOptimizer) and (workers.layout or any(each.is_part for each in modules.values())):
            return _divided_optimizer(name, thing, named, workers)
        return OptimizerPart(thing, names_of(thing, named))
    if isinstance(thing, MirroredVariable):
        return VariablePart(thing)
    if isinstance(thing, torch.Generator):
        return GeneratorPart(thing)
    if isinstance(thing, MutableMapping):
        return ValuesPart(thing)
    if isinstance(thing, Stateful):
        return StatefulPart(thing)
    raise ConfigError(
        f"Checkpoint({name}={thing!r}) cannot be restored in place; give a mirrored module or optimizer, a scheduler, "
        "a strategy.variable, a dict of plain values, or anything with state_dict and load_state_dict"
    )


# Imported here: what they stand on takes 1.3 s, which a program that divides no model need not wait.
def _divided_module(module: MirroredModule, workers: Workers) -> Part:
    from lockstep.checkpoint.divided_parts import DividedModulePart

    return DividedModulePart(module, workers)


def _divided_optimizer(
    name: str, optimizer: MirroredOptimizer, modules: Mapping[str, MirroredModule], workers: Workers
) -> Part:
    from lockstep.checkpoint.divided_parts import DividedOptimizerPart

    return DividedOptimizerPart(name, optimizer, modules, workers)
