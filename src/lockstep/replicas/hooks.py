"""Observers: tools see which devices strategies take, what each run is given and what each update sums.

For tools that inspect a user's unchanged program, such as ``lockstep verify``. Nothing in the engine depends on what an
observer does; without one, a hook costs one read of a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.config import LogicalDevice
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.owner import Owner

_observer: ContextVar[Observer | None] = ContextVar("lockstep_observer", default=None)


@dataclass(frozen=True)
class Totals:
    """One replica's sums since the last update: of its loss values, and of examples, or tokens."""

    total: float | Tensor
    count: float | Tensor


class Observer:
    """Hooks that do nothing; a tool overrides those that it needs. An exception from a hook ends the run."""

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        """Called when a MirroredStrategy is made; it uses the returned devices."""
        return devices

    def run_begins(self, strategy: Owner, views: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Called in ``strategy.run``, before the replicas start, with the arguments of each replica."""

    def update_begins(self, context: ReplicaContext, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """Called in every replica that reaches an update, before gradients are exchanged.

        ``parameters`` are its own copies, with its gradients. The gradients' sum is divided by the sum of the counts in
        ``totals``, which add up to 1 for ``optimizer.step()``.
        """

    def sums_applied(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> None:
        """Called in every replica before an update by sums that the program may have changed since ``update_begins``.

        ``parameters`` are those of the first local replica, with the sums; the others get none.
        """

    def update_ended(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> None:
        """Called in every replica after all replicas' weights have been updated, or the update was skipped."""


def current_observer() -> Observer | None:
    """The observer of the calling code; None without one."""
    return _observer.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A block in which ``observer`` sees all strategies that this thread makes and uses."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
