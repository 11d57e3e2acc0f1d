"""The time that a run may take, and what still fits in it. Pure: seconds in, decisions out.

|-- tests, at most their part --|-- rates and floors --|-- round 1 --|-- round 2, if all of it fits --|-- writing --|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError

TOTAL_S = 600.0
"""Ten minutes, with everything."""
WRITING_S = 15.0
"""Kept for ending processes and writing the table."""
FLOORS_LIMIT_S = 90.0
"""For measuring the device's rates and counting the steps' work."""
TRIAL_LIMIT_S = 150.0
"""For one trial; torch.compile is what takes long."""
_LEAST_S = 60.0
_TESTS_PART = 0.4
_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The seconds of a whole run.

    Args:
        total_s: from its beginning to its end, at least a minute.
    """

    total_s: float = TOTAL_S

    def __post_init__(self) -> None:
        if not self.total_s >= _LEAST_S:
            raise ConfigError(f"budget_s={self.total_s:g} was given, expected at least {_LEAST_S:.0f}; raise it")

    @property
    def tests_s(self) -> float:
        """What the tests may take; what they leave goes to the benchmark."""
        return _TESTS_PART * self.total_s

    def left_s(self, spent_s: float) -> float:
        """What is left for measuring after so many seconds; never below 0."""
        return max(0.0, self.total_s - WRITING_S - spent_s)

    def trial_limit_s(self, spent_s: float) -> float:
        """After how long a trial that begins now is given up."""
        return min(TRIAL_LIMIT_S, self.left_s(spent_s))

    def admits(self, expected_s: float, spent_s: float) -> bool:
        """Whether a trial that is expected to take so long may begin now."""
        return expected_s <= self.left_s(spent_s)

    def admits_round(self, taken_s: Sequence[float], spent_s: float) -> bool:
        """Whether another round may begin: whether as much as the last one's trials took fits, and a margin."""
        return _MARGIN * sum(taken_s) <= self.left_s(spent_s)

    def text(self, trials: int, expected_s: float) -> str:
        """What is planned, for the terminal."""
        return (
            f"budget {self.total_s:.0f} s: tests at most {self.tests_s:.0f}, rates and floors at most "
            f"{FLOORS_LIMIT_S:.0f}, writing {WRITING_S:.0f}; the rest for {trials} trials a round, thought to take "
            f"{expected_s:.0f}; more rounds while a whole one fits"
        )

    def refusal(self, expected_s: float, spent_s: float) -> str:
        """Why a trial did not begin."""
        return (
            f"of the {self.total_s:.0f} s for everything {self.left_s(spent_s):.0f} were left, and it is thought to "
            f"take {expected_s:.0f}; run it with a larger --budget-s, or alone with --only"
        )
