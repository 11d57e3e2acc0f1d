"""Checks of settings. Each raises a ConfigError that says what was given, what was expected, and what would do."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigError

ABOVE_ZERO = sys.float_info.min
UNBOUNDED = sys.float_info.max


def check_least(config: object, least: int, *names: str) -> None:
    """Checks that each of these fields is ``least`` or more; None is a field that was not given."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} was given, expected at least {least}")


def check_settings(config: Any, **ranges: tuple[float, float]) -> None:
    """Checks the fields that are choices from a fixed list, and those with a range: name -> least and greatest value.

    None is in every range, NaN and infinity in none. What all recipes have is checked without being named.
    """
    for name, kind in get_type_hints(type(config)).items():
        if get_origin(kind) is Literal:
            check_choice(name, getattr(config, name), get_args(kind))
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


def check_choice(name: str, value: str | None, known: Sequence[str | None]) -> None:
    """Checks that a string, or None, is one of ``known``."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, known))}")


def check_seconds(name: str, seconds: float | None) -> None:
    """Checks that a time is above 0 and finite; None is one that was not given."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"{name}={seconds!r} was given, expected a number of seconds above 0")


def check_divides(name: str, value: int, *sizes: tuple[str, int]) -> None:
    """Checks that ``value`` divides all sizes, which are given with their names."""
    for of, size in sizes:
        if size % value:
            fitting = divisors(math.gcd(*(each for _, each in sizes)))
            raise ConfigError(f"{name}={value} does not divide {of}={size}; choose {alternatives(fitting)}")


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def alternatives(numbers: Sequence[int], most: int = 12) -> str:
    """``1, 2, 4 or 8``; the middle of a long list is left out."""
    if len(numbers) > most:
        return f"{', '.join(map(str, numbers[: most - 1]))} ... or {numbers[-1]}"
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
