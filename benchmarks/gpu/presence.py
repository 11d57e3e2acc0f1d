"""Whether there is a GPU to measure, and otherwise why not, in one line."""

from __future__ import annotations

import re

import torch

NOTHING_TO_RUN = 77
"""The exit code where there is no GPU: neither success nor failure. Automake and Meson take it for a skipped test."""
_LEAST = (2, 11)


def reason_not_to_run() -> str:
    """Why nothing can be run here; empty where it can."""
    version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _LEAST:
        return f"torch {version} is older than {_LEAST[0]}.{_LEAST[1]}, which this package needs"
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"no CUDA GPU here: torch {version} is built without CUDA"
    return f"no CUDA GPU here: torch {version} sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
