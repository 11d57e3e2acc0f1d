"""Which values of a parameter are slow."""

from __future__ import annotations

import pytest
from tests.tiers import partly_slow


def test_the_values_named_are_marked_and_must_exist():
    quick, slow = partly_slow({"quick": 1, "slow": 2}, "slow")
    assert quick == "quick"
    assert slow.values == ("slow",)
    assert slow.marks == (pytest.mark.slow.mark,) or list(slow.marks) == [pytest.mark.slow]
    with pytest.raises(ValueError, match="none of"):
        partly_slow(["quick"], "renamed")
