"""Where a user's program called a collective: the nearest line outside this package and torch. For messages."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import torch

_PACKAGES = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))


def caller() -> str:
    """Such as ``"train.py:30 in step"``; empty in a thread of this package that runs no line of the program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    if frame.f_code.co_filename == threading.__file__:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
