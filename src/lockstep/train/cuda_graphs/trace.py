"""A step that is run as it is and looked at: does the host wait in it, and was it like the one before?"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.collectives.communicator import call_site
from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.host_syncs import BesideCompiledCode, HostSyncs
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.capture import CarriedState, StepResults, deferring_metrics, tensors
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards
from lockstep.train.step import ReplicaState, StepOutput, train_step

Mark = tuple[Any, ...] | str | int | float | bool | complex | None


@dataclass(frozen=True)
class Call:
    """One operator of a step.

    Args:
        name: such as "aten.mul.Tensor".
        marks: its arguments: of a tensor the shape, the dtype and, where it was there before the step, the address; of
            anything else the value.
        where: the nearest line of the user's program; empty in a backward pass.
    """

    name: str
    marks: tuple[Mark, ...]
    where: str


class StepTrace:
    """The operators of one step of all replicas.

    Args:
        replicas: how many.
        changing: tensors that may be others in the next step: the batch, the gradients and sums of earlier batches.
    """

    def __init__(self, replicas: int, changing: Iterable[torch.Tensor]) -> None:
        # One list more for meetings: what is done there once for all is done by whichever replica comes last.
        self._calls: list[list[Call]] = [[] for _ in range(replicas + 1)]
        # By storage: a view of a batch is the batch. Replicas see each other's tensors when gradients are summed.
        self._inner = {_storage(tensor) for tensor in changing}
        self._outer: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    def in_replica(self) -> TorchDispatchMode:
        """What a replica's part of the step is run in, in its own thread."""
        return _Recorder(self)

    def difference(self, later: StepTrace) -> str | None:
        """The first thing that a later step did otherwise; None if they are alike."""
        for ours, theirs in zip(self._calls, later._calls, strict=True):
            for mine, other in zip(ours, theirs, strict=False):
                if (mine.name, mine.marks) != (other.name, other.marks):
                    return _told(mine, other)
            if len(ours) != len(theirs):
                return f"one step had {len(ours)} operators and the next {len(theirs)}"
        return None

    def end(self, left: Iterable[torch.Tensor]) -> None:
        """After a step with compiled code, which makes tensors of its own: they are no tensors from outside.

        They are known by being gone, or among what the step has left.

        Args:
            left: gradients, outputs.
        """
        gone = (storage for storage, held in self._outer.items() if held.expired())  # type: ignore[no-untyped-call]
        made = {*gone, *map(_storage, left)}
        self._calls = [
            [replace(call, marks=tuple(_unless_made(mark, made) for mark in call.marks)) for call in calls]
            for calls in self._calls
        ]

    def add(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        """Notes an operator that the calling replica has run."""
        leaves = tree_leaves(arguments)
        with self._lock:
            marks = tuple(self._mark(leaf) for leaf in leaves)
            self._inner.update(_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        context = get_replica_context()
        self._calls[-1 if context is None else context.local_replica].append(Call(name, marks, call_site()))

    def _mark(self, leaf: Any) -> Mark:
        if isinstance(leaf, torch.Tensor):
            storage = _storage(leaf)
            if storage in self._inner:
                return (tuple(leaf.shape), str(leaf.dtype), None)
            if leaf.layout is torch.strided:
                self._outer[storage] = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
            return (tuple(leaf.shape), str(leaf.dtype), storage)
        if isinstance(leaf, (bool, int, float, complex, str)):
            return leaf
        return str(type(leaf))


class _Recorder(BesideCompiledCode):
    def __init__(self, trace: StepTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of a tensor from outside is from outside too, and an operator that writes gives what it was given.
        fresh = None if func.is_view or func._schema.is_mutable else result
        # Fused optimizers' rate, which a recorded step reads from a tensor.
        named = {name: value for name, value in (kwargs or {}).items() if name != "lr"}
        self._trace.add(str(func), (args, named), fresh)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _unless_made(mark: Mark, made: set[int]) -> Mark:
    return (*mark[:2], None) if isinstance(mark, tuple) and mark[2] in made else mark


def _told(mine: Call, other: Call) -> str:
    place = f" at {other.where}" if other.where else ""
    if mine.name != other.name:
        return f"{mine.name} in one step is {other.name} in the next{place}"
    for before, now in zip(mine.marks, other.marks, strict=False):
        if before != now:
            if isinstance(before, tuple) and isinstance(now, tuple):
                if before[:2] == now[:2]:
                    return f"{mine.name}{place} reads a tensor that is another one in every step; update it in place"
                return f"{mine.name}{place} got the shape {list(before[0])} and in the next step {list(now[0])}"
            return f"{mine.name}{place} computed with {before} and in the next step with {now}"
    return f"{mine.name}{place} got other arguments in the next step"


class ObservedStep:
    """One look at a step.

    Attributes:
        results: what the step gave.
        trace: what it did.

    Args:
        strategy: runs it.
        setup: whose step.
        states: the replicas'.
        carried: what earlier steps have left.
    """

    def __init__(
        self, strategy: Strategy, setup: TrainSetup, states: Sequence[ReplicaState], carried: CarriedState
    ) -> None:
        self._strategy, self._setup, self._states, self._carried = strategy, setup, states, carried

    def run(self, batch: Any, due: bool) -> None:
        """Runs the step."""
        strategy = self._strategy
        self.trace = StepTrace(len(strategy.devices), [*tensors(batch), *self._carried.now().tensors])
        self._setup.module.align()  # as the run would: what was set on the user's module is no change of the step's
        standing, drawn = StepGuards(self._setup, ()), self._host_random()
        with deferring_metrics(self._states) as kept, HostSyncs() as reads:
            found = strategy.run(_watched_step, (self.trace, self._setup, PerReplica(self._states), batch, due))
        self.results = StepResults(strategy.local_results(found), [each.arguments for each in kept])
        if self._setup.module.is_compiled:
            outputs = [leaf for leaf in tree_leaves(self.results.metrics) if isinstance(leaf, torch.Tensor)]
            self.trace.end([*outputs, *self._carried.now().tensors])
        self._places = list(dict.fromkeys(reads.places))
        self._change = standing.change()
        self._drew = not all(map(torch.equal, drawn, self._host_random()))

    def check(self) -> None:
        """Whether such a step can be recorded.

        Raises:
            NotCapturableError: it cannot.
        """
        if self._places:
            operator, line = self._places[0]
            more = f", and in {len(self._places) - 1} other places" if len(self._places) > 1 else ""
            raise NotCapturableError(f"the step reads from the device at {line} ({operator}){more}")
        if self._drew:
            raise NotCapturableError("the step draws random numbers on the host, which a recording would repeat")
        if self._change is not None:
            raise NotCapturableError(f"the step changes what a recording takes for granted: {self._change}")

    def _host_random(self) -> list[torch.Tensor]:
        """Where the replicas' generators of the host stand, for devices that draw from others."""
        if self._strategy.devices[0].torch_device.type == "cpu":
            return []
        return [state["cpu"] for state in self._strategy.generators.states()]


@wraps(train_step)  # what the first run of a step is looked at for has been looked at
def _watched_step(trace: StepTrace, setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with trace.in_replica():
        return train_step(setup, state, item, update)
