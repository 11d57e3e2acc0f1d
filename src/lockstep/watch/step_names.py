"""How messages name a step function, at which line they warn, and which functions are a library's own."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.introspection import attribute_of, is_kind
from lockstep.tracebacks import LOCKSTEP_FOLDERS

LIBRARIES = (*LOCKSTEP_FOLDERS, str(Path(torch.__file__).parent))
"""The folders of torch and of this package, whose own functions are not looked at."""


def plain_function(fn: Any) -> Any:
    """The function under partials and bound methods."""
    while is_kind(fn, partial):
        fn = fn.func
    return attribute_of(fn, "__func__", fn)


def is_of_the_package(fn: Callable[..., Any]) -> bool:
    """Whether a step function is one of this package or of torch, such as that of ``fit``."""
    code = attribute_of(plain_function(fn), "__code__")
    return code is not None and code.co_filename.startswith(LIBRARIES)


def description_of_step(fn: Callable[..., Any]) -> str:
    """A step function as a warning names it: "the step train (program.py:12)"."""
    plain = plain_function(fn)
    code = attribute_of(plain, "__code__")
    where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return f"the step {attribute_of(plain, '__qualname__', type(fn).__qualname__)}{where}"


def warn_of_step(fn: Callable[..., Any], message: str) -> None:
    """Warns of what a step does; see ``warn_caller``."""
    warn_caller(f"{description_of_step(fn)} {message}")


def warn_caller(message: str) -> None:
    """Warns at the program's line that runs a step, however many calls of this package are between."""
    frame, level = sys._getframe(1), 2
    between = (*LIBRARIES, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(between):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
