"""The command, on the workload that takes milliseconds."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from benchmarks.__main__ import main

QUICK = ["workers", "--workload", "linear", "--rounds", "1", "--steps", "1", "--warm-up", "1"]


@pytest.mark.slow
@pytest.mark.workers
def test_one_command_measures_and_writes_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("benchmarks.suites.workers.why_no_hosts", lambda: "no root here")

    assert main([*QUICK, "--only", "workers-2", "ddp-2", "hosts-2x2", "--output", str(tmp_path)]) == 0

    (table,) = tmp_path.glob("*-workers-cpu-*.md")
    text = table.read_text()
    assert text.startswith("# Many workers on CPUs, ")
    assert "## One host: one linear layer" in text
    assert "| workers-2 | " in text
    assert "| step time, workers-2 / ddp-2 | at most 1.00 | " in text
    assert "## Two hosts, link 1000 Mbit/s: one linear layer" in text
    assert "| hosts-2x2 | not run | " in text
    assert "- hosts-2x2: not run: no root here" in text
    record = json.loads(table.with_suffix(".json").read_text())
    assert [sample["contender"] for sample in record["samples"]] == ["workers-2", "ddp-2"]
    assert [one["text"] for one in record["comparisons"]] == ["step time, workers-2 / ddp-2"]
    # Both have done one update of the same weights on the same batch.
    assert record["samples"][0]["loss"] == pytest.approx(record["samples"][1]["loss"], rel=1e-4)
    assert caplog.messages[-1] == f"written to {table}"
