"""The part for each thing that a checkpoint is given, and those of plain things: schedulers, values, generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.format import DamagedStateError, TensorRef, check_kind, check_like
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.reduce import sum_tensors
from lockstep.data.resume import random_state, set_random_state
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.replicas.rng.state import ReplicaGenerators

if TYPE_CHECKING:
    from lockstep.checkpoint.sharded_io import TensorShard


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """What one worker's part gives.

    Args:
        shared: equal on all workers.
        replicas: one item per local replica; empty where replicas have nothing of their own.
        worker: this worker's own.
        weights: the tensors of a module's state_dict.
        held: what this worker holds of tensors that ``shared`` says are ``nested.TensorRef``, by their keys.
        weight_shards: what it holds of the tensors of a module's state_dict, where ``weights`` has none.
    """

    shared: Any = None
    replicas: Sequence[Any] = ()
    worker: Any = None
    weights: Mapping[str, torch.Tensor] | None = None
    held: Mapping[str, TensorShard] = field(default_factory=dict)
    weight_shards: Mapping[str, TensorShard] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint holds for one part.

    Args:
        name: the part's name.
        source: the checkpoint, for messages.
        shared: as it was given.
        replicas: one item per replica of all workers that saved; empty where they had nothing of their own.
        workers: one item per worker that saved.
        weights: the tensors of a module's state_dict, if it is one.
        weights_in: the file or folder that has them, where they were not read.
        same_layout: as many workers and replicas save and restore, and divide the model alike.
        first_replica: the number of this worker's first replica among those of all workers.
        local_replicas: how many this worker has.
        worker_index: which of the processes that save and restore this is.
        step: of which step it is.
    """

    name: str
    source: str
    shared: Any
    replicas: Sequence[Any]
    workers: Sequence[Any]
    weights: Mapping[str, torch.Tensor]
    weights_in: str | None
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


class StateAdapter(ABC):
    """One thing whose state a checkpoint holds."""

    @abstractmethod
    def state(self) -> AdapterState:
        """The state now. Every worker must call it."""

    @abstractmethod
    def check(self, saved: SavedState) -> None:
        """Looks whether ``saved`` fits, before anything is loaded.

        Raises:
            CheckpointError: it does not.
        """

    @abstractmethod
    def load(self, saved: SavedState) -> None:
        """Takes the state. Every worker must call it."""


def fault_of(act: Callable[[], None]) -> str:
    """Acts, and says what went wrong; an empty text where nothing did."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  all workers raise it, as soon as they know of it
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return ""


def check_faults(workers: Communicator, name: str, fault: str) -> None:
    """Raises on all workers what went wrong on any. Every worker must call it.

    Args:
        workers: this worker's view of all.
        name: what this call is for.
        fault: what went wrong here; empty where nothing did.

    Raises:
        CheckpointError: the first worker's fault.
    """
    faults = [told.decode() for told in workers.all_gather_bytes(name, fault.encode())]
    for number, theirs in enumerate(faults):
        if theirs:
            raise CheckpointError(theirs if workers.is_single else f"{workers.names[number]}: {theirs}")


def on_everyone(workers: Communicator, name: str, act: Callable[[], None]) -> None:
    """Lets every worker act. Every worker must call it.

    Raises:
        CheckpointError: one of them failed.
    """
    check_faults(workers, name, fault_of(act))


_SAVED: Any = {
    "kind": str,
    "state": {"state": dict[int, dict[str, Any]], "param_groups": [{"params": list[int]}]},
}
Names = list[list[str]]
"""Of each group the names of its parameters, in order."""


def kind_of(optimizer: Optimizer) -> str:
    """What the user's own optimizer is, such as "AdamW"."""
    return type(optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer).__name__


def prefixed(modules: Mapping[str, MirroredModule]) -> dict[str, MirroredModule]:
    """Mirrored modules by what the names of their parameters begin with, so that no two are called alike."""
    return {"" if len(modules) == 1 else f"{name}.": module for name, module in modules.items()}


def names_of(optimizer: Optimizer, modules: Mapping[str, MirroredModule]) -> Names | None:
    """The names of an optimizer's parameters; None where one belongs to none of the modules.

    Args:
        optimizer: mirrored or not.
        modules: as ``prefixed`` gives them.
    """
    known = {
        id(parameter): f"{prefix}{name}"
        for prefix, module in modules.items()
        for name, parameter in module.module.named_parameters()
    }
    found = [[known.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    return found if all(name for group in found for name in group) else None


def check_state(shared: Any, optimizer: Optimizer) -> None:
    """Looks whether what was saved for an optimizer is of the kinds that ``OptimizerAdapter`` saves.

    Raises:
        DamagedStateError: it is not.
    """
    check_kind(shared, _SAVED, "the optimizer")
    check_kind(shared.get("names"), list[list[str]] | None, "the optimizer.names")
    state = shared["state"]
    if shared.get("names") is not None:
        for group, names in zip(state["param_groups"], shared["names"], strict=True):
            check_like(tuple(group["params"]), (0,) * len(names), "the optimizer.param_groups.params")
    if not _by_torch(optimizer):
        return
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        plain = {name: value for name, value in own.items() if name not in ("params", "param_names")}
        check_like(saved, plain, "the optimizer.param_groups")
    kinds: dict[str, Any] = {}
    for number, values in state["state"].items():
        for slot, value in values.items():
            kind = torch.Tensor if isinstance(value, (torch.Tensor, TensorRef)) else type(value)
            check_kind(value, kinds.setdefault(slot, kind), f"the optimizer.state.{number}.{slot}")


def _by_torch(optimizer: Optimizer) -> bool:
    plain = optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer
    return type(plain).__module__.startswith("torch.")


def check_class(saved: SavedState, optimizer: Optimizer) -> None:
    """An optimizer's state fits one of the same class with as many groups.

    Raises:
        CheckpointError: another class, or another number of groups.
    """
    kind, groups = saved.shared["kind"], saved.shared["state"]["param_groups"]
    if kind != kind_of(optimizer) or len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{saved.source} has for {saved.name!r} the state of a {kind} with {len(groups)} groups, but it is a "
            f"{kind_of(optimizer)} with {len(optimizer.param_groups)}; make the optimizer as it was when that was saved"
        )


def by_name(shared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What an optimizer has saved for each parameter that it has a state for."""
    state = shared["state"]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = [name for group in shared["names"] for name in group]
    pairs = zip(numbers, names, strict=True)
    return {name: state["state"][number] for number, name in pairs if number in state["state"]}


def in_order(shared: Mapping[str, Any], names: Names | None) -> dict[str, Any]:
    """A saved state_dict with its numbers changed to an optimizer's own order.

    Args:
        shared: what was saved.
        names: of the optimizer that takes it; where these, or those of the other, are not known, or not the same, the
            order stays.
    """
    state: dict[str, Any] = shared["state"]
    theirs = shared.get("names")
    if names is None or theirs is None or names == theirs or not _same(names, theirs):
        return state
    values = by_name(shared)
    ours = [name for group in names for name in group]
    numbers = iter(range(len(ours)))
    return {
        "state": {number: values[name] for number, name in enumerate(ours) if name in values},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in own]}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def _same(ours: Sequence[Iterable[str]], theirs: Sequence[Iterable[str]]) -> bool:
    return [set(group) for group in ours] == [set(group) for group in theirs]


class ModuleAdapter(StateAdapter):
    """A mirrored module: its state_dict as weights, and each replica's buffers."""

    def __init__(self, module: MirroredModule) -> None:
        self._module = module

    def state(self) -> AdapterState:
        """The weights with averaged buffers, and the buffers of each copy, those that no state_dict has included."""
        self._module.exchange_buffers()
        state = self._module.state_dict()
        return AdapterState(
            shared={key: value for key, value in state.items() if not isinstance(value, torch.Tensor)},
            replicas=[dict(duplicate.named_buffers()) for duplicate in self._module.copies],
            weights={key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        )

    def check(self, saved: SavedState) -> None:
        """The keys and shapes must be the module's."""
        check_kind(saved.shared, dict[str, Any], "state_dict")
        check_kind(saved.replicas, list[dict[str, torch.Tensor]], "buffers")
        state = self._module.module.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        check_fit(saved.weights, tensors, saved.source)

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
        """Each replica gets its own buffers back; on another layout all get the averages."""
        self._module.load_state_dict({**saved.weights, **saved.shared})
        own = saved.own
        averages = _averages(saved.replicas) if saved.replicas else {}  # of a divided module they are in the weights
        buffers = own if own is not None else [averages] * len(self._module.copies)
        for duplicate, values in zip(self._module.copies, buffers, strict=True):
            for name, buffer in duplicate.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


class OptimizerAdapter(StateAdapter):
    """An optimizer, mirrored or not: state and hyperparameters of all groups.

    Args:
        optimizer: whose.
        names: of its parameters; None where they are not known.
    """

    def __init__(self, optimizer: Optimizer, names: Names | None = None) -> None:
        self._optimizer, self._names = optimizer, names

    def state(self) -> AdapterState:
        """The plain optimizer's state_dict, and the names of its parameters."""
        named = {} if self._names is None else {"names": self._names}
        return AdapterState(shared={"kind": kind_of(self._optimizer), **named, "state": self._optimizer.state_dict()})

    def check(self, saved: SavedState) -> None:
        """It must be of the same class, with as many parameters in each group."""
        check_state(saved.shared, self._optimizer)
        kind, groups = saved.shared["kind"], saved.shared["state"]["param_groups"]
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in self._optimizer.param_groups]
        if kind != kind_of(self._optimizer) or theirs != ours:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} the state of a {kind} with {_sizes(theirs)} parameters, but it "
                f"is a {kind_of(self._optimizer)} with {_sizes(ours)}; make the optimizer as it was when that was saved"
            )

    def load(self, saved: SavedState) -> None:
        """Takes state and hyperparameters, the learning rate included."""
        self._optimizer.load_state_dict(in_order(saved.shared, self._names))


class VariableAdapter(StateAdapter):
    """A mirrored variable: every replica's value."""

    def __init__(self, variable: MirroredVariable) -> None:
        self._variable = variable

    def state(self) -> AdapterState:
        """The values of the local replicas."""
        return AdapterState(replicas=list(self._variable.values))

    def check(self, saved: SavedState) -> None:
        """The shapes must be the same."""
        check_kind(saved.replicas, list[torch.Tensor], "values")
        ours, theirs = self._variable.values[0].shape, saved.replicas[0].shape
        if ours != theirs:
            raise CheckpointError(
                f"{saved.source} has for {saved.name!r} a variable of shape {tuple(theirs)} instead of {tuple(ours)}; "
                "make the variable as it was when that was saved"
            )

    @torch.no_grad()
    def load(self, saved: SavedState) -> None:
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


_STATES = dict[str, torch.Tensor]
_OF_A_PROCESS: Any = {"process": _STATES, "gpus": list[torch.Tensor]}


class RngAdapter(StateAdapter):
    """torch's default generators, Python's and numpy's, each worker's own, and those of the replicas.

    Args:
        generators: the local replicas'.
    """

    def __init__(self, generators: ReplicaGenerators) -> None:
        self._generators = generators

    def state(self) -> AdapterState:
        """Where all of them stand now; each process has its own, also where several hold a replica together."""
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpus = torch.cuda.get_rng_state_all() if in_use else []
        replicas = self._generators.states()
        return AdapterState(worker={"process": random_state(None), "gpus": on_gpus, "replicas": replicas})

    def check(self, saved: SavedState) -> None:
        """Every state of the same layout has as many replicas."""
        check_kind(saved.workers, list[_OF_A_PROCESS], "random numbers")
        ours, theirs = len(self._generators.states()), len(saved.worker.get("replicas", saved.own or ()))
        if saved.same_layout and ours != theirs:
            raise DamagedStateError(f"random numbers of {theirs} replicas instead of {ours}")

    def load(self, saved: SavedState) -> None:
        """Puts all back; on another layout the replicas' are derived anew, and every process gets the chief's."""
        set_random_state(None, saved.worker["process"])
        on_gpus = saved.worker["gpus"]
        if on_gpus and torch.cuda.is_available() and torch.cuda.device_count() == len(on_gpus):
            torch.cuda.set_rng_state_all(on_gpus)
        own = saved.worker["replicas"] if saved.same_layout and "replicas" in saved.worker else saved.own
        if own is None or len(own) != len(self._generators.states()):
            self._generators.derive(saved.step)
        else:
            self._generators.set_states(own)


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be taken and given back: schedulers, gradient scalers, metrics, plain modules."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StatefulAdapter(StateAdapter):
    """Anything with ``state_dict`` and ``load_state_dict``, equal on all workers."""

    def __init__(self, thing: Stateful) -> None:
        self._thing = thing

    def state(self) -> AdapterState:
        """Its state_dict, and its class."""
        return AdapterState(shared={"kind": type(self._thing).__name__, "state": self._thing.state_dict()})

    def check(self, saved: SavedState) -> None:
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

    def load(self, saved: SavedState) -> None:
        """Hands the state over."""
        self._thing.load_state_dict(saved.shared["state"])


class DictAdapter(StateAdapter):
    """A dict of plain values, such as ``{"epoch": 0, "step": 0}``, restored in place."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state(self) -> AdapterState:
        """The values."""
        return AdapterState(shared=dict(self._values))

    def check(self, saved: SavedState) -> None:
        """Any values fit."""
        check_kind(saved.shared, dict, "values")

    def load(self, saved: SavedState) -> None:
        """Puts the saved values into the dict; others that it holds stay."""
        self._values.update(saved.shared)


class GeneratorAdapter(StateAdapter):
    """A ``torch.Generator``, each worker's own."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state(self) -> AdapterState:
        """Its state."""
        return AdapterState(worker=self._generator.get_state())

    def check(self, saved: SavedState) -> None:
        """Every state of a generator fits, until it is set."""
        check_kind(saved.workers, list[torch.Tensor], "state")

    def load(self, saved: SavedState) -> None:
        """Sets it; on another layout to the chief's."""
        self._generator.set_state(saved.worker)


def adapter_for(name: str, thing: Any, modules: Mapping[str, MirroredModule], workers: Communicator) -> StateAdapter:
    """The part for one thing given to a Checkpoint.

    Args:
        name: of the thing.
        thing: the thing.
        modules: the mirrored modules among all things, by name.
        workers: all that save and restore together.

    Raises:
        ConfigError: a thing without a state that can be given back to it.
    """
    if isinstance(thing, StateAdapter):
        return thing
    if isinstance(thing, MirroredModule):
        return _divided_module(thing, workers) if thing.is_part else ModuleAdapter(thing)
    if isinstance(thing, Optimizer):
        named = prefixed(modules)
        if isinstance(thing, MirroredOptimizer) and (workers.layout or any(each.is_part for each in modules.values())):
            return _divided_optimizer(name, thing, named, workers)
        return OptimizerAdapter(thing, names_of(thing, named))
    if isinstance(thing, MirroredVariable):
        return VariableAdapter(thing)
    if isinstance(thing, torch.Generator):
        return GeneratorAdapter(thing)
    if isinstance(thing, MutableMapping):
        return DictAdapter(thing)
    if isinstance(thing, Stateful):
        return StatefulAdapter(thing)
    raise ConfigError(
        f"Checkpoint({name}={thing!r}) cannot be restored in place; give a mirrored module or optimizer, a scheduler, "
        "a strategy.variable, a dict of plain values, or anything with state_dict and load_state_dict"
    )


# Imported here: what they stand on takes 1.3 s, which a program that divides no model need not wait.
def _divided_module(module: MirroredModule, workers: Communicator) -> StateAdapter:
    from lockstep.checkpoint.sharded_state import ShardedModuleAdapter

    return ShardedModuleAdapter(module, workers)


def _divided_optimizer(
    name: str, optimizer: MirroredOptimizer, modules: Mapping[str, MirroredModule], workers: Communicator
) -> StateAdapter:
    from lockstep.checkpoint.sharded_state import ShardedOptimizerAdapter

    return ShardedOptimizerAdapter(name, optimizer, modules, workers)
