from __future__ import annotations

import pickle

import pytest

from benchmarks.loops import memory_format
from benchmarks.suites.cpu import roster
from lockstep.errors import ConfigError


def test_rivals_try_both_memory_formats_where_there_are_convolutions():
    assert [contender.name for contender in roster("mobilenetv2") if contender.counted] == [
        "lockstep-2",
        "lockstep-4",
        "half alone",
        "halves together",
        "single channels_last",
        "single",
        "ddp-2 channels_last",
        "ddp-2",
        "ddp-4 channels_last",
        "ddp-4",
    ]
    assert [contender.name for contender in roster("mlm") if contender.counted] == [
        "lockstep-2",
        "lockstep-4",
        "half alone",
        "halves together",
        "single",
        "ddp-2",
        "ddp-4",
    ]


def test_checks_are_not_counted():
    checks = [contender.name for contender in roster("mlm") if not contender.counted]

    assert checks == ["lockstep-2 fit", "single keeping", "ddp-2 keeping"]


def test_contenders_can_travel_to_a_process():
    for contender in roster("mobilenetv2"):
        assert pickle.loads(pickle.dumps(contender)) == contender
        assert contender.peer == ""


def test_a_plain_loop_has_no_automatic_layout():
    with pytest.raises(
        ConfigError, match="layout='auto' is for our strategies; a plain loop takes one of channels_last, contiguous"
    ):
        memory_format("auto")
