"""The operators of a step, recorded while it runs as usual, to compare it with the next step.

A captured step repeats the operators of one step with the numbers of that step. A learning rate that a schedule
changes, a loss weight that grows, or a layer that is left out by chance would stay as they were. So two steps are
compared before one is captured: the same operators, on the same shapes, with the same numbers, reading the same tensors
from outside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lockstep._torch_compat import TorchDispatchMode, tree_leaves
from lockstep.collectives.communicator import call_site
from lockstep.replicas.context import get_replica_context

Argument = tuple[Any, ...] | str | int | float | bool | complex | None
"""An argument of an operator. A tensor is (shape, dtype, storage), with None as storage if the step made it."""


class OperatorCall(NamedTuple):
    """One operator of a step, and the nearest line of the user's program; empty in a backward pass."""

    name: str
    arguments: tuple[Argument, ...]
    where: str


class StepTrace:
    """The operators of one step of all replicas. The tensors of its ``batch`` may be others in the next step."""

    def __init__(self, replicas: int, batch: Iterable[torch.Tensor]) -> None:
        # The extra list is for collectives: the replica that comes last does there what is done once for all.
        self._calls: list[list[OperatorCall]] = [[] for _ in range(replicas + 1)]
        # By storage, as a view of the batch is the batch. Replicas see each other's tensors when gradients are summed.
        self._inner = {_storage(tensor) for tensor in batch}
        self._lock = threading.Lock()

    def in_replica(self) -> TorchDispatchMode:
        """The mode that traces one replica's part of the step, in the replica's thread."""
        return _TraceMode(self)

    def difference(self, later: StepTrace) -> str | None:
        """The first difference of a later step; None if the steps are alike."""
        for ours, theirs in zip(self._calls, later._calls, strict=True):
            for mine, other in zip(ours, theirs, strict=False):
                if mine[:2] != other[:2]:
                    return _describe(mine, other)
            if len(ours) != len(theirs):
                return f"one step had {len(ours)} operators and the next {len(theirs)}"
        return None

    def add(self, name: str, arguments: Any, result: Any) -> None:
        """Adds an operator that the calling replica has run."""
        with self._lock:
            found = tuple(self._argument(leaf) for leaf in tree_leaves(arguments))
            self._inner.update(_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        context = get_replica_context()
        self._calls[-1 if context is None else context.local_replica].append(OperatorCall(name, found, call_site()))

    def _argument(self, leaf: Any) -> Argument:
        if isinstance(leaf, torch.Tensor):
            storage = _storage(leaf)
            return (tuple(leaf.shape), str(leaf.dtype), None if storage in self._inner else storage)
        return leaf if isinstance(leaf, (bool, int, float, complex, str)) else str(type(leaf))


class _TraceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _describe(mine: OperatorCall, other: OperatorCall) -> str:
    place = f" at {other.where}" if other.where else ""
    if mine.name != other.name:
        return f"{mine.name} in one step is {other.name} in the next{place}"
    for before, now in zip(mine.arguments, other.arguments, strict=False):
        if before != now:
            if isinstance(before, tuple) and isinstance(now, tuple) and before[:2] == now[:2]:
                return f"{mine.name}{place} reads a tensor that is another one in every step; update it in place"
            return f"{mine.name}{place} computed with {before} and in the next step with {now}"
    return f"{mine.name}{place} got other arguments in the next step"
