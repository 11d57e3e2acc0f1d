"""Observes a step while it runs as usual: does the host wait for the device in it, and was it like the step before?

A captured step repeats the operators of one step with the numbers of that step. A learning rate that a schedule
changes, a loss weight that grows, or a layer that is left out by chance would stay as they were. So two steps are
compared before one is captured: the same operators, on the same shapes, with the same numbers, reading the same tensors
from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep._torch_compat import TorchDispatchMode, tree_leaves
from lockstep.collectives.communicator import call_site
from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.host_syncs import BesideCompiledCode, HostSyncs
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.capture import CarriedState, StepResults, deferring_metrics, tensors
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards
from lockstep.train.step import ReplicaState, StepOutput, train_step

Argument = tuple[Any, ...] | str | int | float | bool | complex | None
"""An argument of an operator. A tensor is (shape, dtype, storage), with None as storage if the step made it."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator of a step, and the nearest line of the user's program; empty in a backward pass."""

    name: str
    arguments: tuple[Argument, ...]
    where: str


class StepTrace:
    """The operators of one step of all replicas.

    ``changing`` are tensors that may be others in the next step: the batch, and the gradients and sums so far.
    """

    def __init__(self, replicas: int, changing: Iterable[torch.Tensor]) -> None:
        # The extra list is for collectives: the replica that comes last does there what is done once for all.
        self._calls: list[list[OperatorCall]] = [[] for _ in range(replicas + 1)]
        # By storage, as a view of the batch is the batch. Replicas see each other's tensors when gradients are summed.
        self._inner = {_storage(tensor) for tensor in changing}
        self._outer: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()

    def in_replica(self) -> TorchDispatchMode:
        """The mode that traces one replica's part of the step, in the replica's thread."""
        return _TraceMode(self)

    def difference(self, later: StepTrace) -> str | None:
        """The first difference of a later step; None if the steps are alike."""
        for ours, theirs in zip(self._calls, later._calls, strict=True):
            for mine, other in zip(ours, theirs, strict=False):
                if (mine.name, mine.arguments) != (other.name, other.arguments):
                    return _describe(mine, other)
            if len(ours) != len(theirs):
                return f"one step had {len(ours)} operators and the next {len(theirs)}"
        return None

    def drop_internal(self, left: Iterable[torch.Tensor]) -> None:
        """After a step with compiled code: tensors that the code has made by itself are no tensors from outside.

        They are those that are freed, or in what the step has ``left``: its gradients and outputs.
        """
        freed = (storage for storage, held in self._outer.items() if held.expired())  # type: ignore[no-untyped-call]
        made = {*freed, *map(_storage, left)}
        self._calls = [
            [replace(call, arguments=tuple(_unless_made(each, made) for each in call.arguments)) for call in calls]
            for calls in self._calls
        ]

    def add(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        """Adds an operator that the calling replica has run."""
        leaves = tree_leaves(arguments)
        with self._lock:
            found = tuple(self._argument(leaf) for leaf in leaves)
            self._inner.update(_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        context = get_replica_context()
        self._calls[-1 if context is None else context.local_replica].append(OperatorCall(name, found, call_site()))

    def _argument(self, leaf: Any) -> Argument:
        if isinstance(leaf, torch.Tensor):
            storage = _storage(leaf)
            if storage in self._inner:
                return (tuple(leaf.shape), str(leaf.dtype), None)
            if leaf.layout is torch.strided:
                self._outer[storage] = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
            return (tuple(leaf.shape), str(leaf.dtype), storage)
        return leaf if isinstance(leaf, (bool, int, float, complex, str)) else str(type(leaf))


class _TraceMode(BesideCompiledCode):
    """Adds the operators of one replica to a trace."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of a tensor from outside is from outside too, and an operator that writes returns what it was given.
        fresh = None if func.is_view or func._schema.is_mutable else result
        # A captured step reads the rate of fused optimizers from a tensor.
        named = {name: value for name, value in (kwargs or {}).items() if name != "lr"}
        self._trace.add(str(func), (args, named), fresh)
        return result


class ObservedStep:
    """Runs one step and observes it.

    Attributes:
        results: what the step returned.
        trace: what it did.
    """

    def __init__(
        self, setup: TrainSetup, states: PerReplica[ReplicaState], carried: CarriedState, batch: Any, due: bool
    ) -> None:
        strategy = setup.strategy
        self.trace = StepTrace(len(strategy.devices), [*tensors(batch), *carried.now().tensors])
        setup.module.align()  # as the run would: what was set on the user's module is no change by the step
        guards, drawn = StepGuards(setup, free=()), _host_generators(strategy)
        with deferring_metrics(states.values) as metrics, HostSyncs() as reads:
            found = strategy.run(_traced_step, (self.trace, setup, states, batch, due))
        self.results = StepResults(strategy.local_results(found), metrics)
        if setup.module.is_compiled:
            outputs = tree_leaves([each.arguments for each in metrics])
            outputs = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
            self.trace.drop_internal([*outputs, *carried.now().tensors])
        self._waits = list(dict.fromkeys(reads.syncs))
        self._change = guards.change()
        self._drew = not all(map(torch.equal, drawn, _host_generators(strategy)))

    def check(self) -> None:
        """Raises a NotCapturableError if a step like this cannot be captured."""
        if self._waits:
            operator, line = self._waits[0]
            more = f", and in {len(self._waits) - 1} other places" if len(self._waits) > 1 else ""
            raise NotCapturableError(f"the step reads from the device at {line} ({operator}){more}")
        if self._drew:
            raise NotCapturableError("the step draws random numbers on the host, which a replay would repeat")
        if self._change is not None:
            raise NotCapturableError(f"the step changes what a captured step assumes: {self._change}")


def _host_generators(strategy: Strategy) -> list[torch.Tensor]:
    """The states of the replicas' host generators, if the device draws from others."""
    on_host = strategy.devices[0].torch_device.type == "cpu"
    return [] if on_host else [state["cpu"] for state in strategy.generators.states()]


@wraps(train_step)  # so that the strategy's check of the first run of a step is not made again
def _traced_step(trace: StepTrace, setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with trace.in_replica():
        return train_step(setup, state, item, update)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _unless_made(argument: Argument, made: set[int]) -> Argument:
    return (*argument[:2], None) if isinstance(argument, tuple) and argument[2] in made else argument


def _describe(mine: OperatorCall, other: OperatorCall) -> str:
    place = f" at {other.where}" if other.where else ""
    if mine.name != other.name:
        return f"{mine.name} in one step is {other.name} in the next{place}"
    for before, now in zip(mine.arguments, other.arguments, strict=False):
        if before != now:
            if isinstance(before, tuple) and isinstance(now, tuple):
                if before[:2] == now[:2]:
                    return f"{mine.name}{place} reads a tensor that is another one in every step; update it in place"
                return f"{mine.name}{place} got the shape {list(before[0])} and in the next step {list(now[0])}"
            return f"{mine.name}{place} computed with {before} and in the next step with {now}"
    return f"{mine.name}{place} got other arguments in the next step"
