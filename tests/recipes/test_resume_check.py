from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lockstep.errors import CheckpointError
from lockstep_tools.recipes.training import ResumeCheck, settings_except


@dataclass(frozen=True, kw_only=True)
class Config:
    """Of some recipe."""

    seed: int = 0
    cache: str = "memory"


def test_settings_are_looked_for_once_and_not_before_a_checkpoint_needs_them():
    found: list[int] = []

    def find() -> dict[str, Any]:
        found.append(1)
        return {"seed": 0}

    callback = ResumeCheck(find)
    assert found == []

    callback.check_state_dict(callback.state_dict())
    assert found == [1]


def test_settings_that_differ_are_named_with_both_values():
    with pytest.raises(CheckpointError, match="of a run with seed=1, and this run has seed=0; resume with"):
        ResumeCheck(lambda: {"seed": 0, "size": 8}).check_state_dict({"seed": 1, "size": 8})


def test_a_setting_that_the_backup_does_not_know_is_no_difference():
    ResumeCheck(lambda: {"seed": 0, "size": 8}).check_state_dict({"seed": 0})


def test_settings_but_those_that_do_not_matter():
    assert settings_except(Config(seed=3), ("cache",)) == {"seed": 3}
