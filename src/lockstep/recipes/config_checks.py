"""Checks of the settings of a recipe. Each raises ConfigError with the value, and what was expected."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigError

ABOVE_ZERO = sys.float_info.min
UNBOUNDED = sys.float_info.max


def check_settings(config: Any, **ranges: tuple[float, float]) -> None:
    """Checks the fields that are choices from a fixed list, and those with a range: name -> least and greatest value.

    None is in every range, NaN and infinity in none. What all recipes have is checked without being named.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            one_of(name, getattr(config, name), get_args(kind))
    common = {
        "epochs": (1, UNBOUNDED),
        "accumulate": (1, UNBOUNDED),
        "seed": (0, 2**32 - 1),
        "learning_rate": (ABOVE_ZERO, UNBOUNDED),
    }
    for name, (least, most) in {**common, **ranges}.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            lower = "a number above 0" if least == ABOVE_ZERO else f"at least {least}"
            upper = "" if most == UNBOUNDED else f" and at most {most}"
            raise ConfigError(f"{name}={value} was given, expected {lower}{upper}")


def at_least(name: str, value: int, least: int) -> None:
    """Checks that a number is ``least`` or more."""
    if value < least:
        raise ConfigError(f"{name}={value} was given, expected at least {least}")


def at_least_each(config: Any, least: int, *names: str) -> None:
    """Checks that each of these fields is ``least`` or more."""
    for name in names:
        at_least(name, getattr(config, name), least)


def divides(name: str, value: int, of: str, total: int) -> None:
    """Checks that ``value`` divides ``total``; the message lists what does."""
    if total % value:
        divisors = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ConfigError(f"{name}={value} does not divide {of}={total}; choose one of {divisors}")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Checks that a string is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
