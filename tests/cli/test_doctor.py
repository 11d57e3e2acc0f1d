"""``lockstep doctor`` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lockstep

pytestmark = pytest.mark.slow


def test_it_tells_of_all_parts_and_ends_with_a_block_for_a_report(python):
    workers = ["127.0.0.1:20000", "127.0.0.1:20001"]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}

    process = python("-m", "lockstep_tools.cli", "doctor", TF_CONFIG=json.dumps(task))
    out, err = process.communicate(timeout=120)

    assert (process.returncode, err) == (0, "")
    shown, _, report = out.partition("To paste into a report:")
    told = {line.strip().partition("  ")[0]: line.strip().partition("  ")[2].strip() for line in shown.splitlines()}
    assert told["lockstep"] == lockstep.__version__
    assert told["gloo"] == "works"
    assert told["cluster"] == "worker 1 of 2 workers, declared by TF_CONFIG"
    assert told["workers"] == ", ".join(workers)
    assert "cpu:0" in told
    sections = [line.partition(":")[0] for line in report.strip().splitlines()[1:5]]
    assert sections == ["versions", "devices", "network", "limits"]
    assert "20000" not in report
    assert str(Path.home()) not in report
