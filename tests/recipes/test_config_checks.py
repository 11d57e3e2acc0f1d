from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.errors import ConfigError
from lockstep.recipes import config_checks


@pytest.mark.parametrize(
    "passes",
    [
        lambda: config_checks.at_least("epochs", 1, 1),
        lambda: [config_checks.between("workers", value, 0, 256) for value in (0, 256)],
        lambda: [config_checks.positive("clip_norm", value) for value in (None, 1e-9)],
        lambda: [config_checks.fraction("shift", value, most=0.5) for value in (0, 0.5)],
        lambda: config_checks.one_of("cache", "disk", ("memory", "disk")),
    ],
)
def test_what_is_allowed_passes_up_to_the_limits(passes: Callable[[], object]):
    passes()


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: config_checks.at_least("epochs", 0, 1), "epochs=0 was given, expected at least 1"),
        (lambda: config_checks.between("seed", -1, 0, 9), "seed=-1 was given, expected an integer from 0 to 9"),
        (lambda: config_checks.between("seed", 10, 0, 9), "seed=10 was given, expected an integer from 0 to 9"),
        (lambda: config_checks.positive("rate", 0.0), "rate=0.0 was given, expected a finite number above 0"),
        (lambda: config_checks.positive("rate", float("inf")), "rate=inf was given, expected a finite number above 0"),
        (lambda: config_checks.positive("rate", float("nan")), "rate=nan was given, expected a finite number above 0"),
        (
            lambda: config_checks.fraction("shift", 0.6, most=0.5),
            "shift=0.6 was given, expected a fraction from 0 up to 0.5",
        ),
        (
            lambda: config_checks.fraction("test", 0.0, most=0.9, above_zero=True),
            "expected a fraction above 0 and up to 0.9",
        ),
        (
            lambda: config_checks.one_of("cache", "tape", ("memory", "disk")),
            "unknown; choose one of memory, disk",
        ),
    ],
)
def test_what_is_not_is_refused_with_what_was_expected(refused: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        refused()
