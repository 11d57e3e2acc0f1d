"""State adapters: how each kind of thing in a Checkpoint gives its state, checks a saved state, and loads it.

State that is equal on all workers is saved once. What each replica has of its own (buffers, values of variables, random
numbers) goes back to the replica of that number, on whatever worker and device it is now. On another number of replicas
it is combined as the kind of thing requires.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.format import DamagedStateError
from lockstep.checkpoint.weights import check_fit
from lockstep.collectives.reduce import sum_tensors
from lockstep.data.random_state import random_state, set_random_state
from lockstep.errors import CheckpointError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.parallel.tensor_files import TensorShard
from lockstep.replicas.rng.generators import ReplicaGenerators

Names = list[list[str]]  # for each parameter group of an optimizer the names of its parameters, in order


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """What one worker's adapter gives."""

    shared: Any = None  # state that is equal on all workers
    replicas: Sequence[Any] = ()  # one item per local replica; empty if replicas have no state of their own
    worker: Any = None  # this worker's own state
    weights: Mapping[str, torch.Tensor] | None = None  # the tensors of a module's state_dict
    # what this worker holds of tensors that are ``TensorRef``s in ``shared``, by their keys
    shards: Mapping[str, TensorShard] = field(default_factory=dict)
    # what it holds of the tensors of a module's state_dict, if ``weights`` has none
    weight_shards: Mapping[str, TensorShard] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint holds for one adapter."""

    name: str  # the name of the thing
    source: str  # the checkpoint's path, for messages
    shared: Any  # state that was equal on all workers
    replicas: Sequence[Any]  # one item per replica of all workers that saved; empty if they had no state of their own
    workers: Sequence[Any]  # one item per worker that saved
    weights: Mapping[str, torch.Tensor]  # the tensors of a module's state_dict, if it is one
    weights_in: str | None  # the file or folder that has them, if they were not read
    same_replicas: bool  # as many replicas save and restore, and their workers divide the model alike
    same_layout: bool  # also, as many workers, each with as many of the replicas
    first_replica: int  # the index of this worker's first replica among those of all workers
    local_replicas: int  # the number of this worker's replicas
    worker_index: int  # the index of this process among those that save and restore
    step: int  # the number of the step

    @property
    def local_items(self) -> Sequence[Any] | None:
        """The local replicas' items, in order; None on another number of replicas."""
        return self._local(self.replicas) if self.same_replicas else None

    @property
    def worker(self) -> Any:
        """This worker's item; on another layout the chief's."""
        return self.workers[self.worker_index if self.same_layout else 0]

    @property
    def random_of_replicas(self) -> Sequence[Any] | None:
        """The random states of the local replicas, in order; None on another number of replicas."""
        if not self.same_replicas:
            return None
        if self.same_layout:  # where several workers hold a replica together, each has its own
            return list(self.worker["replicas"])
        return self._local([item for worker in self.workers for item in worker["replicas"]])

    def _local(self, items: Sequence[Any]) -> Sequence[Any]:
        return items[self.first_replica : self.first_replica + self.local_replicas]


class StateAdapter(ABC):
    """Gives and takes the state of one thing in a Checkpoint. Every worker must make the same calls."""

    def saving(self) -> AbstractContextManager[None]:
        """A block in which a checkpoint is collected and written, or copied. Every worker enters it."""
        return nullcontext()

    @abstractmethod
    def state(self) -> AdapterState:
        """Returns the current state."""

    @abstractmethod
    def check(self, entry: SavedState) -> None:
        """Raises a CheckpointError if ``entry`` does not fit, before anything is loaded."""

    @abstractmethod
    def load(self, entry: SavedState) -> None:
        """Loads ``entry``. On other replicas, all get what fits all of them, and so do other workers."""


class ModuleAdapter(StateAdapter):
    """A mirrored module: its state_dict, with averaged buffers, as weights; and each replica's own buffers."""

    def __init__(self, module: MirroredModule) -> None:
        self._module = module

    def state(self) -> AdapterState:
        self._module.exchange_buffers()
        state = self._module.state_dict()
        return AdapterState(
            shared={key: value for key, value in state.items() if not isinstance(value, torch.Tensor)},
            replicas=[dict(copy.named_buffers()) for copy in self._module.copies],
            weights={key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        )

    def check(self, entry: SavedState) -> None:
        state = self._module.module.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        check_fit(entry.weights, tensors, entry.source)

    @torch.no_grad()
    def load(self, entry: SavedState) -> None:
        """Loads the weights. Each replica gets its own buffers back; another number of them, all the averages."""
        self._module.load_state_dict({**entry.weights, **entry.shared})
        averages = _averages(entry.replicas) if entry.replicas else {}  # a sharded module has them in its weights
        buffers = entry.local_items or [averages] * len(self._module.copies)
        for copy, values in zip(self._module.copies, buffers, strict=True):
            for name, buffer in copy.named_buffers():
                if name in values:
                    buffer.copy_(values[name])


class OptimizerAdapter(StateAdapter):
    """An optimizer, mirrored or not: the plain optimizer's state_dict, and the names of its parameters, if known."""

    def __init__(self, optimizer: Optimizer, names: Names | None = None) -> None:
        self._optimizer, self._names = optimizer, names

    def state(self) -> AdapterState:
        names = {} if self._names is None else {"names": self._names}
        return AdapterState(
            shared={"kind": class_name(self._optimizer), **names, "state": self._optimizer.state_dict()}
        )

    def check(self, entry: SavedState) -> None:
        check_optimizer(entry, self._optimizer)
        groups = entry.shared["state"]["param_groups"]
        saved_sizes = " + ".join(str(len(group["params"])) for group in groups)
        sizes = " + ".join(str(len(group["params"])) for group in self._optimizer.param_groups)
        if saved_sizes != sizes:
            raise CheckpointError(
                f"{entry.source} has for {entry.name!r} the state of {saved_sizes} parameters, but it has {sizes}; "
                "make the optimizer as it was when that was saved"
            )

    def load(self, entry: SavedState) -> None:
        state = in_order(entry.shared, self._names)
        self._optimizer.load_state_dict(with_strides_of_parameters(state, self._optimizer))


class VariableAdapter(StateAdapter):
    """A mirrored variable: every replica's value."""

    def __init__(self, variable: MirroredVariable) -> None:
        self._variable = variable

    def state(self) -> AdapterState:
        return AdapterState(replicas=list(self._variable.values))

    def check(self, entry: SavedState) -> None:
        shape, saved_shape = self._variable.values[0].shape, entry.replicas[0].shape
        if shape != saved_shape:
            raise CheckpointError(
                f"{entry.source} has for {entry.name!r} a variable of shape {tuple(saved_shape)} instead of "
                f"{tuple(shape)}; make the variable as it was when that was saved"
            )

    @torch.no_grad()
    def load(self, entry: SavedState) -> None:
        """Each replica gets its own value back. Of another number, a read outside of replicas gives the same."""
        if entry.local_items is not None:
            for value, before in zip(self._variable.values, entry.local_items, strict=True):
                value.copy_(before)
            return
        on_read = self._variable.synchronization == "on_read"
        first = rest = entry.replicas[0]
        if on_read and self._variable.aggregation == "sum":
            # The whole sum goes to the chief's first replica: a division would round, and integers cannot be divided.
            first, rest = sum_tensors(list(entry.replicas)), torch.zeros_like(rest)
        elif on_read and self._variable.aggregation == "mean":
            first = rest = sum_tensors(list(entry.replicas)) / len(entry.replicas)
        for number, value in enumerate(self._variable.values, start=entry.first_replica):
            value.copy_(rest if number else first)


class PlainAdapter(StateAdapter):
    """A thing with one state, equal on all workers; or ``per_worker`` each one's, and on other workers the chief's.

    ``get`` returns the state and ``set_state`` takes it; ``kind`` must be the same when it is restored.
    """

    def __init__(
        self, kind: str, get: Callable[[], Any], set_state: Callable[[Any], object], *, per_worker: bool = False
    ) -> None:
        self._kind, self._get, self._set_state, self._per_worker = kind, get, set_state, per_worker

    def state(self) -> AdapterState:
        value = {"kind": self._kind, "state": self._get()}
        return AdapterState(worker=value) if self._per_worker else AdapterState(shared=value)

    def check(self, entry: SavedState) -> None:
        value = entry.worker if self._per_worker else entry.shared
        kind = value.get("kind") if isinstance(value, Mapping) else None
        if kind != self._kind:
            raise CheckpointError(
                f"{entry.source} has for {entry.name!r} the state of a {kind}, but it is a {self._kind}; "
                "give the things the names they were saved under"
            )

    def load(self, entry: SavedState) -> None:
        self._set_state((entry.worker if self._per_worker else entry.shared)["state"])


class RngAdapter(StateAdapter):
    """torch's default generators, Python's and NumPy's, each process's own, and those of the local replicas."""

    def __init__(self, generators: ReplicaGenerators) -> None:
        self._generators = generators

    def state(self) -> AdapterState:
        # The replicas' states are saved per process, too: several processes may hold one replica together.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpus = torch.cuda.get_rng_state_all() if in_use else []
        replicas = self._generators.states()
        return AdapterState(worker={"process": random_state(None), "gpus": on_gpus, "replicas": replicas})

    def check(self, entry: SavedState) -> None:
        count, states = len(self._generators.states()), entry.random_of_replicas
        if states and count and count != len(states):  # the default strategy has none: there, torch's own are used
            raise DamagedStateError(f"random numbers of {len(states)} replicas instead of {count}")

    def load(self, entry: SavedState) -> None:
        """Restores all of them. On another layout each process gets the chief's.

        On another number of replicas the replicas' are derived anew.
        """
        set_random_state(None, entry.worker["process"])
        on_gpus = entry.worker["gpus"]
        # There is one state for each GPU of the process that saved; with fewer GPUs torch raises an error.
        if on_gpus and torch.cuda.is_available() and torch.cuda.device_count() == len(on_gpus):
            torch.cuda.set_rng_state_all(on_gpus)
        states = entry.random_of_replicas
        if states and self._generators.states():
            self._generators.set_states(states)
        else:
            self._generators.derive(entry.step)


# ---- optimizers' states by the names of parameters. Their numbers follow the order in which an optimizer got them: one
# device's optimizer has all parameters, a pipeline stage's has some; the names are the same on each.


def class_name(optimizer: Optimizer) -> str:
    """Returns the class of the user's own optimizer, such as "AdamW"."""
    return type(optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer).__name__


def check_optimizer(entry: SavedState, optimizer: Optimizer) -> None:
    """Raises a CheckpointError if the state is that of another class, or of other groups."""
    kind, saved_groups, groups = entry.shared["kind"], entry.shared["state"]["param_groups"], optimizer.param_groups
    if kind != class_name(optimizer) or len(saved_groups) != len(groups):
        raise CheckpointError(
            f"{entry.source} has for {entry.name!r} the state of a {kind} with {len(saved_groups)} groups, but it is a "
            f"{class_name(optimizer)} with {len(groups)}; make the optimizer as it was when that was saved"
        )
    for group, saved_group in zip(groups, saved_groups, strict=True):
        for name, value in group.items():
            if isinstance(value, float) and isinstance(saved_group.get(name, value), str | list | dict | None):
                raise DamagedStateError(f"{name} is {saved_group[name]!r} instead of a number")


def by_name(shared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns, by the name of the parameter, the state that an optimizer has saved for it."""
    state = shared["state"]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = [name for group in shared["names"] for name in group]
    pairs = zip(numbers, names, strict=True)
    return {name: state["state"][number] for number, name in pairs if number in state["state"]}


def in_order(shared: Mapping[str, Any], names: Names | None) -> dict[str, Any]:
    """Returns a saved state_dict with its parameters in the order of ``names``, if those are the saved ones."""
    state: dict[str, Any] = shared["state"]
    saved_names = shared.get("names")
    if names in (None, saved_names) or saved_names is None or list(map(set, names)) != list(map(set, saved_names)):
        return state
    values = by_name(shared)
    order = [name for group in names for name in group]
    numbers = iter(range(len(order)))
    return {
        "state": {number: values[name] for number, name in enumerate(order) if name in values},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in members]}
            for group, members in zip(state["param_groups"], names, strict=True)
        ],
    }


def with_strides_of_parameters(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Returns a state_dict whose tensors have the strides of their parameters, which are not saved.

    A fused optimizer reads parameter and moments as flat arrays: with other strides, as of a channels-last weight, it
    would update each element with the moments of another one.
    """

    def strided(value: Any, parameter: torch.Tensor) -> Any:
        if type(value) is not torch.Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
            return value
        empty = torch.empty_strided(value.shape, parameter.stride(), dtype=value.dtype, device=value.device)
        return empty.copy_(value)

    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    numbers = (number for group in state["param_groups"] for number in group["params"])
    states = {
        number: {name: strided(value, parameter) for name, value in state["state"][number].items()}
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in state["state"]
    }
    return {**state, "state": states}


def _averages(replicas: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of each floating-point buffer; the first replica's value of other buffers and of equal ones."""
    means: dict[str, torch.Tensor] = {}
    for name, value in replicas[0].items():
        values = [buffers[name] for buffers in replicas]
        equal = not value.is_floating_point() or all(torch.equal(value, other) for other in values[1:])
        means[name] = value if equal else sum_tensors(values) / len(values)
    return means
