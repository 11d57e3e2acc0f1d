"""Checks of settings. Each raises a ConfigError that says what was given, what was expected, and what would do."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigError

ABOVE_ZERO = sys.float_info.min
UNBOUNDED = sys.float_info.max
MOST_AT_ONCE = 4096
"""The most processes, replicas or threads that are started at once: a larger number is a typing error."""
MOST_SECONDS = 1e9
"""Thirty years; the waits of the operating system take no more than some hundred."""
_SHOWN = 120  # characters of a value in an error
_LONGEST_NAME = 255  # bytes, on Linux's file systems


def check_least(config: object, least: int, *names: str) -> None:
    """Checks that each of these fields is ``least`` or more; None is a field that was not given."""
    for name in names:
        check_number(name, getattr(config, name), least=least, whole=True)


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -UNBOUNDED,
    most: float = UNBOUNDED,
    whole: bool = False,
    optional: bool = True,
) -> None:
    """Checks that a setting is a number in a range. With ``optional``, None passes: it was not given. No bool passes.

    NaN and infinity are in no range, but a whole number may be of any size if there is no ``most``.
    """
    if value is None and optional:
        return
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    # Python's integers may exceed the largest float: comparing them with it is exact, and without a bound they are
    # fine.
    if is_number and least <= value and (value <= most or (whole and most == UNBOUNDED)):
        return
    kind = "a whole number" if whole else "a number"
    bounds = [] if least == -UNBOUNDED else [f"{kind} above 0" if least == ABOVE_ZERO else f"at least {least}"]
    bounds += [] if most >= UNBOUNDED else [f"at most {most}"]
    expected = " and ".join(bounds)
    if not is_number or not bounds:
        expected = f"{kind} of {expected}" if expected.startswith("at") else expected or kind
    raise ConfigError(f"{name}={shown(value)} was given, expected {expected}")


def check_kind(
    name: str, value: object, kind: type | tuple[type, ...], expected: str, *, optional: bool = True
) -> None:
    """Checks that a setting is of a class. With ``optional``, None passes: it was not given."""
    if not (value is None and optional) and not isinstance(value, kind):
        raise ConfigError(f"{name}={shown(value)} was given, expected {expected}")


def check_call(fn: Any, args: Any, kwargs: Any, example: str) -> None:
    """Checks a function, the sequence of its arguments and the dict of its keyword arguments. Raises TypeError.

    ``example`` is a right call.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {type(fn).__name__}; write {example}")
    if not isinstance(args, (tuple, list)):
        kind = type(args).__name__
        raise TypeError(f"args must be a tuple or list of fn's arguments, got {kind}; write args=(x,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(f"kwargs must be a dict of fn's keyword arguments, got {shown(kwargs)}")


def check_path(path: Any, argument: str) -> str:
    """The path that was given as ``argument``; not an empty one, which means the working directory."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise ConfigError(f"{argument} is {shown(path)}; give the path of a file or folder")
    if not text.strip() or "\0" in text:
        raise ConfigError(f"{argument} is {text!r}; give a path, or '.' for the working directory")
    try:
        longest = max(len(os.fsencode(name)) for name in text.split("/"))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{argument} is {text!r}, which is no name of a file: {error.reason}") from error
    if longest > _LONGEST_NAME:
        raise ConfigError(
            f"{argument} is {shown(text)}, with a name of {longest} bytes; file systems take {_LONGEST_NAME}"
        )
    return text


def shown(value: object) -> str:
    """The value as code, on one line that is not too long; its class where its ``repr`` fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - whatever the user's class does; the message is about something else
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
        check_number(name, getattr(config, name), least=least, most=most)


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Checks that a string, or None, is one of ``known``."""
    if not isinstance(value, str | None) or value not in choices:
        raise ConfigError(f"{name}={shown(value)} is unknown; choose one of {', '.join(map(str, choices))}")


def check_seconds(name: str, seconds: Any) -> None:
    """Checks that a time is above 0 and finite; None is one that was not given."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds <= MOST_SECONDS):
        raise ConfigError(f"{name}={shown(seconds)} was given, expected a number of seconds above 0, at most 1e9")


def check_divides(name: str, value: int, *sizes: tuple[str, int]) -> None:
    """Checks that ``value`` divides all sizes, which are given with their names."""
    for of, size in sizes:
        if size % value:
            fitting = divisors(math.gcd(*(number for _, number in sizes)))
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
