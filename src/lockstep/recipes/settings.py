"""The rules that a recipe's settings are held to, each with its message: what was given, and what was expected."""

from __future__ import annotations

import math

from lockstep.errors import ConfigError


def at_least(name: str, value: int, least: int) -> None:
    """Refuses a number below ``least``."""
    if value < least:
        raise ConfigError(f"{name}={value} was given, expected at least {least}")


def between(name: str, value: int, least: int, most: int) -> None:
    """Refuses a whole number outside ``least`` to ``most``."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} was given, expected a whole number from {least} to {most}")


def positive(name: str, value: float | None) -> None:
    """Refuses what is not finite and above 0; None, for a setting that was left out, passes."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value} was given, expected a finite number above 0")


def share(name: str, value: float, *, most: float, open_below: bool = False) -> None:
    """Refuses a part of a whole outside 0 to ``most``; 0 itself too, where ``open_below``."""
    if not 0 <= value <= most or (open_below and value == 0):
        least = "a share above 0 and" if open_below else "a share from 0"
        raise ConfigError(f"{name}={value} was given, expected {least} up to {most}; 0.1 is one in ten")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuses a word that is not known."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
