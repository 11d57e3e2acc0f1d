"""``lockstep devices``: real tables, and one line for what cannot be."""

from __future__ import annotations

import re

import pytest
from tests.stand_in import stand_in_gpus

from lockstep_tools.cli import main

pytestmark = pytest.mark.usefixtures("fresh_devices")


def test_splits_the_cpu_and_lists_its_shares(capsys: pytest.CaptureFixture[str]):
    assert main(["devices", "--devices", "cpu:4"]) == 0
    physical, logical = capsys.readouterr().out.split("\n\n")
    assert physical.splitlines()[2].split()[:2] == ["cpu:0", "CPU"]
    assert "core" in physical
    assert [line.split() for line in logical.splitlines()[2:]] == [
        [f"cpu:{number}", "cpu:0", "1", "of", "4"] for number in range(4)
    ]


def test_a_gpu_s_shares_are_shown_with_their_memory(capsys: pytest.CaptureFixture[str]):
    with stand_in_gpus(None, memory_mb=8192) as (_, driver):
        driver.memory.keep("gpu:0", 300 * 2**20)
        assert main(["devices", "--devices", "gpu:2x2048"]) == 0

    physical, logical = capsys.readouterr().out.split("\n\n")
    cells = [[cell.strip() for cell in re.split("  +", line)] for line in (physical + "\n" + logical).splitlines()]
    assert cells[0] == ["physical", "is", "has", "taken"]
    assert [cells[2][0], cells[2][-1]] == ["cpu:0", "-"]
    assert cells[3] == ["gpu:0", "stand-in", "8192 MB", "300 MB"]
    assert cells[4] == ["logical", "of", "share"]
    assert cells[6:] == [["gpu:0", "gpu:0", "2048 MB"], ["gpu:1", "gpu:0", "2048 MB"]]


def test_takes_what_is_picked_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["devices", "--devices", "cpu:0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["cpu:0", "cpu:0", "all", "of", "it"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tpu:1", "cannot be read at 'tpu:1'"),
        ("cpu:4x2048", "write cpu:4"),
        ("cpu:0,cpu:7", "cpu:0"),
        ("cpu:0,cpu:0", "cpu:0"),
        ("cpu:5000", "ask for 1 to"),
        ("gpu:99", "cpu:0"),
        ("", "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_can(spec: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["devices", "--devices", spec]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("lockstep: error: ")
    assert said in printed.err
