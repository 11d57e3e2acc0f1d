"""The things whose state a checkpoint holds: how each gives its state, and takes it back on any layout.

What is equal on all replicas is kept once. What each replica has of its own (buffers, values of variables) is kept for
each, and goes back to each where the layout is the same; on another layout it is combined as its kind says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.reduction import sum_tensors
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable


@dataclass(frozen=True, kw_only=True)
class PartState:
    """What one worker's part gives.

    Args:
        shared: equal on all workers.
        replicas: one item per local replica; empty where replicas have nothing of their own.
        worker: this worker's own.
        weights: the tensors of a module's state_dict.
    """

    shared: Any = None
    replicas: Sequence[Any] = ()
    worker: Any = None
    weights: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """What a checkpoint holds for one part.

    Args:
        name: the part's name.
        source: the checkpoint, for messages.
        shared: as it was given.
        replicas: one item per replica of all workers that saved; empty where they had nothing of their own.
        workers: one item per worker that saved.
        weights: the tensors of a module's state_dict, if it is one.
        same_layout: as many workers and replicas save and restore.
        first_replica: the number of this worker's first replica among those of all workers.
        local_replicas: how many this worker has.
        worker_index: which of the workers this is.
        step: of which step it is.
    """

    name: str
    source: str
    shared: Any
    replicas: Sequence[Any]
    workers: Sequence[Any]
    weights: Mapping[str, torch.Tensor]
    same_layout: bool
    first_replica: int
    local_replicas: int
    worker_index: int
    step: int

    @property
    def own(self) -> Sequence[Any] | None:
        """The local replicas' items, in order; None on another layout."""
        mine = slice(self.first_replica, self.first_replica + self.local_replicas)
        return self.replicas[mine] if self.same_layout else None

    @property
    def worker(self) -> Any:
        """This worker's item; on another layout the chief's."""
        return self.workers[self.worker_index if self.same_layout else 0]


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be taken and given back: schedulers, gradient scalers, metrics, plain modules."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Part(ABC):
    """One thing whose state a checkpoint holds."""

    @abstractmethod
    def state(self) -> PartState:
        """The state now. Every worker must call it."""

    @abstractmethod
    def check(self, saved: SavedPart) -> None:
        """Looks whether ``saved`` fits, before anything is loaded.

        Raises:
            CheckpointError: it does not.
        """

    @abstractmethod
    def load(self, saved: SavedPart) -> None:
        """Takes the state. Every worker must call it."""


class ModulePart(Part):
    """A mirrored module: its state_dict as weights, and each replica's buffers."""

    def __init__(self, module: MirroredModule) -> None:
        self._module = module

    def state(self) -> PartState:
        """The weights with averaged buffers, and the buffers of each copy, those that no state_dict has included."""
        state = self._module.state_dict()
        return PartState(
            shared={key: value for key, value in state.items() if not isinstance(value, torch.Tensor)},
            replicas=[dict(duplicate.named_buffers()) for duplicate in self._module.copies],
            weights={key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        )

    def check(self, saved: SavedPart) -> None:
        """The keys and shapes must be the module's."""
        state = self._module.module.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        check_fit(saved.weights, tensors, saved.source)

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Each replica gets its own buffers back; on another layout all get the averages."""
        self._module.load_state_dict({**saved.weights, **saved.shared})
        own = saved.own
        buffers = own if own is not None else [_averages(saved.replicas)] * len(self._module.copies)
        for duplicate, values in zip(self._module.copies, buffers, strict=True):
            for name, buffer in duplicate.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


class OptimizerPart(Part):
    """An optimizer, mirrored or not: state and hyperparameters of all groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state(self) -> PartState:
        """The plain optimizer's state_dict."""
        return PartState(shared={"kind": self._kind, "state": self._optimizer.state_dict()})

    def check(self, saved: SavedPart) -> None:
        """It must be of the same class, with as many parameters in each group."""
        kind, groups = saved.shared["kind"], saved.shared["state"]["param_groups"]
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in self._optimizer.param_groups]
        if kind != self._kind or theirs != ours:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} the state of a {kind} with {_sizes(theirs)} parameters, but it "
                f"is a {self._kind} with {_sizes(ours)}; make the optimizer as it was when that was saved"
            )

    def load(self, saved: SavedPart) -> None:
        """Takes state and hyperparameters, the learning rate included."""
        self._optimizer.load_state_dict(saved.shared["state"])

    @property
    def _kind(self) -> str:
        plain = self._optimizer.plain if isinstance(self._optimizer, MirroredOptimizer) else self._optimizer
        return type(plain).__name__


class VariablePart(Part):
    """A mirrored variable: every replica's value."""

    def __init__(self, variable: MirroredVariable) -> None:
        self._variable = variable

    def state(self) -> PartState:
        """The values of the local replicas."""
        return PartState(replicas=list(self._variable.values))

    def check(self, saved: SavedPart) -> None:
        """The shapes must be the same."""
        ours, theirs = self._variable.values[0].shape, saved.replicas[0].shape
        if ours != theirs:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} a variable of shape {tuple(theirs)} instead of {tuple(ours)}; "
                "make the variable as it was when that was saved"
            )

    @torch.no_grad()
    def load(self, saved: SavedPart) -> None:
        """Each replica gets its own value back; on another layout what a read outside gives stays the same."""
        own = saved.own
        if own is not None:
            for value, before in zip(self._variable.values, own, strict=True):
                value.copy_(before)
            return
        on_read = self._variable.synchronization == "on_read"
        first, rest = saved.replicas[0], torch.zeros_like(saved.replicas[0])
        if on_read and self._variable.aggregation == "sum":
            # The whole sum to the chief's first replica: a division would round, and integers cannot be divided.
            first = sum_tensors(list(saved.replicas))
        elif on_read and self._variable.aggregation == "mean":
            first = rest = sum_tensors(list(saved.replicas)) / len(saved.replicas)
        else:
            rest = first
        for number, value in enumerate(self._variable.values, start=saved.first_replica):
            value.copy_(rest if number else first)


class StatefulPart(Part):
    """Anything with ``state_dict`` and ``load_state_dict``, equal on all workers."""

    def __init__(self, thing: Stateful) -> None:
        self._thing = thing

    def state(self) -> PartState:
        """Its state_dict, and its class."""
        return PartState(shared={"kind": type(self._thing).__name__, "state": self._thing.state_dict()})

    def check(self, saved: SavedPart) -> None:
        """It must be of the same class."""
        kind, ours = saved.shared["kind"], type(self._thing).__name__
        if kind != ours:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} the state of a {kind}, but it is a {ours}; "
                "make it as it was when that was saved"
            )

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

    def load(self, saved: SavedPart) -> None:
        """Sets it; on another layout to the chief's."""
        self._generator.set_state(saved.worker)


def part_of(name: str, thing: Any) -> Part:
    """The part for one thing given to a Checkpoint.

    Raises:
        ConfigError: a thing without a state that can be given back to it.
    """
    if isinstance(thing, Part):
        return thing
    if isinstance(thing, MirroredModule):
        return ModulePart(thing)
    if isinstance(thing, Optimizer):
        return OptimizerPart(thing)
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


def _averages(replicas: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of each floating buffer, and the first replica's of the others and of those that are equal anyway."""
    first = replicas[0]
    means: dict[str, torch.Tensor] = {}
    for name, value in first.items():
        values = [each[name] for each in replicas]
        equal = not value.is_floating_point() or all(torch.equal(value, other) for other in values[1:])
        means[name] = value if equal else sum_tensors(values) / len(values)
    return means


def _sizes(groups: Sequence[int]) -> str:
    return " + ".join(map(str, groups))
