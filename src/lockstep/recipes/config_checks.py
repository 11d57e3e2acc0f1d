"""The check of a recipe's settings."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.checks import check_choice
from lockstep.errors import ConfigError

ABOVE_ZERO = sys.float_info.min
UNBOUNDED = sys.float_info.max


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
