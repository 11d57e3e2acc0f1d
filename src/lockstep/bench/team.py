"""The processes of one trial, and what starts them: one interface, whichever Python they run in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from lockstep.bench.laps import LapRecord
from lockstep.bench.trial import Trial

TRIAL_LIMIT_S = 300.0
"""A trial that takes longer is given up."""
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
            ReplicaError: a process ended before its last step, or they took longer than ``TRIAL_LIMIT_S``.
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


def too_slow(trial: Trial) -> str:
    """The message for a trial that took longer than ``TRIAL_LIMIT_S``."""
    return f"{trial.name} was not done after {TRIAL_LIMIT_S:.0f} s; give it fewer --steps or a faster machine"
