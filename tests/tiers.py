"""``make test`` leaves out what is marked ``slow``: a test, a file by ``pytestmark``, or some values of a parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

_ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?\bpytest\.mark\.slow\b", re.MULTILINE)


def partly_slow(values: Iterable[Any], *slow: Any) -> list[Any]:
    """The values of a parameter for ``pytest.mark.parametrize``, of which some are marked slow.

    Raises:
        ValueError: one that would be slow is no value.
    """
    listed = list(values)
    if unknown := [value for value in slow if value not in listed]:
        raise ValueError(f"{unknown} would be slow, and are none of {listed}")
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in listed]


def has_none_of(tier: str, text: str) -> bool:
    """Whether the text of a test file shows that none of its tests is chosen by ``-m TIER``."""
    if tier == "not slow":
        return _ALL_SLOW.search(text) is not None
    return tier in ("slow and not pages", "slow and pages") and "slow" not in text
