"""``make test`` leaves out what is marked ``slow``: a test, a file by ``pytestmark``, or some values of a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def partly_slow(values: Iterable[Any], *slow: Any) -> list[Any]:
    """The values of a parameter for ``pytest.mark.parametrize``, of which some are marked slow.

    Raises:
        ValueError: one that would be slow is no value.
    """
    listed = list(values)
    if unknown := [value for value in slow if value not in listed]:
        raise ValueError(f"{unknown} would be slow, and are none of {listed}")
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in listed]
