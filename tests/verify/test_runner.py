"""Programs that cannot be compared end in one line that says why, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError, ReplicaError
from lockstep_tools.verify.config import Program, VerifyConfig
from lockstep_tools.verify.report import verify

PROGRAMS = Path(__file__).parent / "programs"


def config_of(name: str, *, devices: str | None = "cpu:2", timeout_s: float = 100.0) -> VerifyConfig:
    program = Program(name=name, target=str(PROGRAMS / name))
    return VerifyConfig(program=program, devices=devices, timeout_s=timeout_s)


def test_a_program_that_fails_by_itself_is_named_with_the_place():
    with pytest.raises(ConfigError) as raised:
        verify(config_of("raises.py"))
    assert str(raised.value) == "raises.py fails by itself: ValueError: the data folder is empty (raises.py:5)"
    assert 'raises.py", line 5, in prepare' in str(raised.value.__cause__)


def test_a_program_without_a_strategy_is_not_trained_to_its_end():
    with pytest.raises(ConfigError, match=r"no_strategy.py made no ls.MirroredStrategy, so there is nothing to"):
        verify(config_of("no_strategy.py"))


def test_one_device_is_nothing_to_compare():
    with pytest.raises(ConfigError, match=r"sound_loop.py uses one device only.* lockstep verify --devices cpu:4"):
        verify(config_of("sound_loop.py", devices=None))


def test_a_program_that_fails_on_several_replicas_only_says_so():
    with pytest.raises(ReplicaError, match=r"fails_on_two.py fails on all replicas and not on one: CollectiveError"):
        verify(config_of("fails_on_two.py"))


def test_a_program_that_hangs_is_ended_and_its_last_words_are_kept():
    with pytest.raises(ReplicaError, match=r"did not finish within 3 s.* its last output: waiting for a licence"):
        verify(config_of("hangs.py", timeout_s=3))
