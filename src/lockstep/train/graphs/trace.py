"""What a step did, operator by operator, to be compared with the step before it.

A recorded step repeats the operators of one step with its numbers: a learning rate that a schedule changes, a weight
of a loss that grows, a layer that is left out by chance would stay for ever as they were in that step. So two steps
are compared before one is recorded: the same operators, on the same shapes, with the same numbers, reading the same
tensors from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.collectives.communicator import caller
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.host_syncs import BesideCompiledCode

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
        self._calls[-1 if context is None else context.local_replica].append(Call(name, marks, caller()))

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
