"""Metrics beside a recorded step: they count in Python, so they are updated after it, from what the step has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.collectives.per_replica import PerReplica
from lockstep.strategies.base import Strategy
from lockstep.train.step import ReplicaState


class Kept:
    """Stands where a replica's metrics do, and keeps what they would have been updated with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, Any] | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Called by the step as a metric's ``update``."""
        self.arguments = (outputs, targets)


@contextmanager
def metrics_apart(states: Sequence[ReplicaState]) -> Iterator[list[Kept]]:
    """Inside the block steps update no metric; what they would have been given is in what the block gets.

    Args:
        states: one per replica.
    """
    kept = [Kept() for _ in states]
    metrics = [state.metrics for state in states]
    try:
        for state, keeps in zip(states, kept, strict=True):
            state.metrics = {"kept": keeps} if state.metrics else {}
        yield kept
    finally:
        for state, own in zip(states, metrics, strict=True):
            state.metrics = own


def update_metrics(strategy: Strategy, states: Sequence[ReplicaState], arguments: Sequence[Any]) -> None:
    """Updates every replica's metrics, in the replicas.

    Args:
        strategy: whose replicas.
        states: one per replica.
        arguments: per replica the outputs and targets; None where there was no row.
    """
    if any(state.metrics for state in states):
        strategy.run(_update, (PerReplica(list(states)), PerReplica([_Arguments(each) for each in arguments])))


class _Arguments:
    """Wrapped, so that nothing looks inside for values per replica."""

    def __init__(self, arguments: tuple[Any, Any] | None) -> None:
        self.arguments = arguments


def _update(state: ReplicaState, given: _Arguments) -> None:
    if given.arguments is None:
        return
    outputs, targets = given.arguments
    for name, metric in state.metrics.items():
        try:
            metric.update(outputs, targets)
        except Exception as error:
            error.add_note(f"metric {name!r}, updated with (outputs, targets)")
            raise
