from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lockstep.checks import ABOVE_ZERO, check_settings
from lockstep.errors import ConfigError


@dataclass
class Settings:
    """Of some recipe."""

    epochs: int = 1
    accumulate: int = 1
    seed: int = 0
    learning_rate: float | None = None
    padding: Literal["longest", "full"] = "longest"
    rate: float | None = 0.5


def check(**settings: Any) -> None:
    check_settings(Settings(**settings), rate=(ABOVE_ZERO, 0.5))


@pytest.mark.parametrize("settings", [{}, {"rate": None}, {"rate": 1e-9}, {"seed": 2**32 - 1}, {"learning_rate": 9.0}])
def test_what_is_allowed_passes_up_to_the_limits(settings: dict[str, Any]):
    check(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs=0 was given, expected at least 1$"),
        ({"accumulate": 0}, "accumulate=0 was given, expected at least 1$"),
        ({"seed": -1}, "seed=-1 was given, expected at least 0 and at most 4294967295$"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"learning_rate": float("inf")}, "learning_rate=inf was given, expected a number above 0$"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"rate": 0.0}, "rate=0.0 was given, expected a number above 0 and at most 0.5$"),
        ({"rate": 0.6}, "rate=0.6"),
        ({"padding": "left"}, "padding='left' is unknown; choose one of longest, full$"),
    ],
)
def test_what_is_not_is_refused_with_what_was_expected(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        check(**settings)
