"""Checks of the settings of a recipe. Each raises ConfigError with the value, and what was expected."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigError


def check_common(config: Any) -> None:
    """Checks what all recipes have: epochs, accumulate, seed, learning rate, and choices from a fixed list."""
    at_least_each(config, 1, "epochs", "accumulate")
    between("seed", config.seed, 0, 2**32 - 1)
    positive("learning_rate", config.learning_rate)
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            one_of(name, getattr(config, name), get_args(kind))


def at_least(name: str, value: int, least: int) -> None:
    """Checks that a number is ``least`` or more."""
    if value < least:
        raise ConfigError(f"{name}={value} was given, expected at least {least}")


def at_least_each(config: Any, least: int, *names: str) -> None:
    """Checks that each of these fields is ``least`` or more."""
    for name in names:
        at_least(name, getattr(config, name), least)


def between(name: str, value: int, least: int, most: int) -> None:
    """Checks that an integer is from ``least`` to ``most``."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} was given, expected an integer from {least} to {most}")


def positive(name: str, value: float | None) -> None:
    """Checks that a number is finite and above 0; None is allowed."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value} was given, expected a finite number above 0")


def fraction(name: str, value: float, *, most: float, above_zero: bool = False) -> None:
    """Checks that a number is from 0 to ``most``; with ``above_zero`` 0 itself is an error too."""
    if not 0 <= value <= most or (above_zero and value == 0):
        expected = "a fraction above 0 and" if above_zero else "a fraction from 0"
        raise ConfigError(f"{name}={value} was given, expected {expected} up to {most}; 0.1 is one in ten")


def probability(name: str, value: float) -> None:
    """Checks that a number is in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} was given, expected a probability in [0, 1); try 0.1")


def divides(name: str, value: int, of: str, total: int) -> None:
    """Checks that ``value`` divides ``total``; the message lists what does."""
    if total % value:
        divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ConfigError(f"{name}={value} does not divide {of}={total}; choose one of {divisors}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Checks that a string is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
