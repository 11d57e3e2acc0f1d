"""The processes of one trial, and what starts them: one interface, whichever Python they run in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from benchmarks.laps import LapRecord
from benchmarks.trial import Trial

TRIAL_LIMIT_S = 300.0
"""A trial that takes longer is given up, if it has no limit of its own."""
END_LIMIT_S = 30.0
"""Processes that have not ended so long after they were let go are killed."""


class Team(ABC):
    """The running processes of one trial. Whoever launched it calls ``end``, on errors too."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """The processes that train."""

    @abstractmethod
    def records(self) -> list[LapRecord]:
        """One record of each process that trains; they stay in their last step until ``end``.

        Raises:
            ReplicaError: a process ended before its last step, or they took longer than ``limit_of`` says.
        """

    @abstractmethod
    def end(self) -> None:
        """Lets the processes go on to their end, and ends those that do not."""


class Launcher(ABC):
    """A way to start the processes of a trial."""

    @abstractmethod
    def launch(self, trial: Trial, folder: Path) -> Team:
        """Starts them.

        Args:
            trial: what they do.
            folder: empty, for whatever they need; it outlives them.
        """


def limit_of(trial: Trial) -> float:
    """Seconds after which a trial is given up: its own limit, or else ``TRIAL_LIMIT_S``."""
    return TRIAL_LIMIT_S if trial.limit_s is None else trial.limit_s


def too_slow(trial: Trial) -> str:
    """The message for a trial that took longer than its limit."""
    return f"{trial.name} was not done after {limit_of(trial):.0f} s; give it fewer --steps or a faster machine"
