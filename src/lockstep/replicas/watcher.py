"""Watchers: what looks at the runs of a strategy, and changes none of their numbers.

    looks_at -> run_begins -> each replica: in_replica [torch_called, differentiates, ..., update_ended] -> run_ended

The step guard, the looks at some runs of a step, front ends such as Keras's, and ``lockstep verify`` are watchers. A
strategy asks its watchers at the beginning of each run who looks at it; a run without any pays one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import LogicalDevice
from lockstep.replicas.owner import Owner

PROCEED: Any = object()
"""The answer of a ``TorchCalled`` where the call is to be made as it is."""

TorchCalled = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Given a torch function, its arguments and keyword arguments: PROCEED, or the result to use instead of the call's."""

BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])

ambient_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("lockstep_watchers", default=())
"""Those that look at all strategies which the calling code uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One call of ``strategy.run``, as it begins."""

    strategy: Owner
    fn: Callable[..., Any]
    arguments: tuple[Any, Any]  # args and kwargs, as the caller gave them
    views: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]  # those of each local replica
    shards: Sequence[Sequence[Any]]  # the leaves of each local replica's arguments
    rows: Sequence[int | None]  # of each local replica's shard, taken from its first argument that has rows
    distributed: bool  # whether any argument has a value for each replica


@dataclass(frozen=True, slots=True)
class Totals:
    """One replica's sums since the last update: of its loss values, and of examples, or tokens."""

    total: float | Tensor
    count: float | Tensor


@dataclass(frozen=True, slots=True)
class Differentiation:
    """A call of ``backward`` or of ``torch.autograd.grad``."""

    roots: Sequence[Any]  # tensors, or graph edges, that gradients begin at
    inputs: Sequence[Any] | None  # what gradients are asked for; None for all leaves
    returns: bool  # whether it returns the gradients, as ``torch.autograd.grad`` does, and adds them to no ".grad"

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Differentiation:
        """That of a call of one of ``BACKWARDS``."""
        roots = kwargs.get("tensors", kwargs.get("outputs", args[0] if args else ()))
        is_grad = func is torch.autograd.grad
        inputs = kwargs.get("inputs", args[1] if is_grad and len(args) > 1 else None)
        return cls(as_sequence(roots), None if inputs is None else as_sequence(inputs), is_grad)


class Watcher:
    """Moments that do nothing; a watcher overrides those that it needs. An exception from a moment ends the run.

    ``replica`` is the number of a local replica, in whose thread the moment is. ``lockstep.get_replica_context`` has
    more of it.

    Attributes:
        sees_every_step: whether steps that CUDA graphs would replay run as usual, so that the moments are called.
    """

    sees_every_step = True

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        """Called when a strategy is made in ``watching``; it uses the returned devices."""
        return devices

    def looks_at(self, run: Run) -> Sequence[Watcher]:
        """Who looks at a run: this watcher, others that it has made for this run alone, or nobody."""
        return (self,)

    def run_begins(self, run: Run) -> None:
        """Before the replicas start, in the caller's thread."""

    def in_replica(self, replica: int) -> AbstractContextManager[None]:
        """A block around the replica's part of the run."""
        return nullcontext()

    def torch_called(self, replica: int) -> TorchCalled | None:
        """What is called before each call of a torch function by the replica; None to see no calls."""
        return None

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        """Before a backward pass of the replica."""

    def collective_called(self, replica: int, name: str, value: Any) -> None:
        """Before an ``all_reduce`` or ``all_gather`` of the replica."""

    def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """In every replica that reaches an update, before gradients are exchanged.

        ``parameters`` are its copies, with its gradients. The gradients' sum is divided by the sum of the counts in
        ``totals``, which add up to 1 for ``optimizer.step()``.
        """

    def sums_applied(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        """In every replica before an update by sums that the program may have changed since ``update_begins``.

        ``parameters`` are those of the first local replica, with the sums; the others get none.
        """

    def update_ended(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        """In every replica after all replicas' weights have been updated, or the update was skipped."""

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        """After the run, in the caller's thread; ``error`` is what it failed with. The last to begin is the first."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """A block in which ``watcher`` looks at all strategies that this thread makes and uses."""
    token = ambient_watchers.set((*ambient_watchers.get(), watcher))
    try:
        yield
    finally:
        ambient_watchers.reset(token)


def torch_looks(watchers: Sequence[Watcher], replica: int) -> tuple[TorchCalled, ...]:
    """What is called before each call of a torch function by a replica at whose run ``watchers`` look."""
    looks = [look for watcher in watchers if (look := watcher.torch_called(replica)) is not None]
    # A look at every call costs time, so that watchers without this moment get none.
    listeners = [watcher for watcher in watchers if type(watcher).differentiates is not Watcher.differentiates]
    return (partial(_differentiates, listeners, replica), *looks) if listeners else tuple(looks)


def _differentiates(watchers: Sequence[Watcher], replica: int, func: Any, args: Any, kwargs: Any) -> Any:
    if func in BACKWARDS:
        differentiation = Differentiation.of(func, args, kwargs)
        for watcher in watchers:
            watcher.differentiates(replica, differentiation)
    return PROCEED


def as_sequence(values: Any) -> Sequence[Any]:
    """``values``, or the one value, as a sequence."""
    if isinstance(values, dict):
        return list(values.values())
    return values if isinstance(values, (list, tuple)) else [values]
