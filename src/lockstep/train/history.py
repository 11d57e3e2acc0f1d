"""What ``fit`` returns: the logs of every epoch as lists, and how long each epoch took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """How long the training part of one epoch took; validation and callbacks are not in it.

    Args:
        epoch: the epoch, from 0.
        seconds: the sum over the steps, reading of the batches included.
        steps: global batches.
        examples: rows of all replicas.
        median_step_s: the median over the epoch's steps, reading of the batch included, in seconds.
    """

    epoch: int
    seconds: float
    steps: int
    examples: int
    median_step_s: float

    @property
    def examples_per_s(self) -> float:
        """Examples a second over the whole epoch."""
        return self.examples / self.seconds if self.seconds > 0 else 0.0


class History:
    """The record of one ``fit``, with Keras's names.

    ``history`` maps each name of the logs ("loss", "accuracy", "val_loss" ...) to a list with one number per epoch in
    which it was logged; ``epoch`` lists the epochs, from 0; ``timing`` has one EpochTiming per epoch.

    Example:
        >>> history = History()
        >>> history.add(0, {"loss": 2.0})
        >>> history.history
        {'loss': [2.0]}
    """

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []
        self.timing: list[EpochTiming] = []

    def add(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Appends the logs of one epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"
