"""An observer hears what strategies do: which devices they take, what each run is given, what each update sums.

For tools that look into a user's unchanged program, such as one that compares N replicas with one. Nothing in the
engine depends on what an observer does; without one, a hook costs the look at a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.config import LogicalDevice

if TYPE_CHECKING:
    from lockstep.mirroring.optim.step import Totals
    from lockstep.replicas.context import ReplicaContext
    from lockstep.strategies.base import Strategy


_observer: ContextVar[Observer | None] = ContextVar("lockstep_observer", default=None)


class Observer:
    """Hears nothing by itself; a tool overrides the hooks that it needs. An exception from a hook ends the run."""

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        """A MirroredStrategy is made on ``devices``; those that are returned are taken."""
        return devices

    def run_begins(self, strategy: Strategy, views: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """``strategy.run`` was called. Outside replicas, before they start.

        Args:
            strategy: whose run it is.
            views: per replica, the positional and the keyword arguments that it gets.
        """

    def update_begins(self, context: ReplicaContext, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """A replica has reached an update; no gradient has been exchanged. Called in every replica.

        Args:
            context: the calling replica's.
            parameters: its own copies, in the optimizer's order; ``.grad`` is this replica's gradient.
            totals: its sums since the last update. The gradients' sum is divided by the sum of the counts, which add
                up to 1 for ``optimizer.step()``.
        """

    def update_ended(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> None:
        """All replicas' weights have been updated, or the update was skipped. Called in every replica."""


def current_observer() -> Observer | None:
    """Who observes what this code does; None for nobody."""
    return _observer.get()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Lets ``observer`` hear all strategies that are made and used inside the ``with`` block, in this thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
