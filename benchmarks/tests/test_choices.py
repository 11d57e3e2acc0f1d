from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.processes import Body
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.suites.choices import choices, run_in_bf16, run_pinned, run_with_all_cores
from benchmarks.trial import Trial
from benchmarks.workloads import find_workload

pytestmark = pytest.mark.usefixtures("fresh_devices")


def seen_in_steps(name: str, body: Body, look: Any) -> tuple[set[Any], float]:
    """What a look at the replica's thread in each step found, and the last loss."""
    contender = next(choice for choice in choices() if choice.name == name)
    found: set[Any] = set()
    linear = find_workload("linear")

    def loss(outputs: Any, y: Any) -> Any:
        found.add(look(outputs))
        return linear.loss(outputs, y)

    trial = Trial(workload=replace(linear, loss=loss), contender=contender, warm_up=1, steps=1, cores=2)
    records: list[StepRecord] = []
    threads = torch.get_num_threads()
    try:
        body(trial, None, StepTimer(warm_up=1, steps=1, started_s=0.0, report=records.append))
    finally:
        torch.set_num_threads(threads)
    return found, records[0].loss


def test_pinned_replicas_stay_on_cores_of_their_own():
    own = os.sched_getaffinity(0)
    found, _ = seen_in_steps("pinned, 2", run_pinned, lambda _: tuple(sorted(os.sched_getaffinity(0))))

    share = max(1, len(own) // 2)
    assert {len(cores) for cores in found} == {share}
    assert len(found) == min(2, len(own))
    assert os.sched_getaffinity(0) == own  # of the thread that asked


def test_replicas_have_all_cores_as_threads():
    found, _ = seen_in_steps("all cores each, 2", run_with_all_cores, lambda _: torch.get_num_threads())

    assert found == {2}


def test_the_forward_pass_is_in_bf16_and_the_loss_is_not():
    found, _ = seen_in_steps("bf16, 2", run_in_bf16, lambda outputs: outputs.dtype)

    assert found == {torch.float32}


def test_the_command_writes_the_table(tmp_path: Path):
    words = ["choices", "--workload", "linear", "--rounds", "1", "--steps", "1", "--warm-up", "1"]
    code = main([*words, "--only", "as it is, 2", "bf16, 2", "--output", str(tmp_path)])

    assert code == 0
    (table,) = tmp_path.glob("*-choices-cpu-*.md")
    rows = [line for line in table.read_text().splitlines() if line.startswith(("| as it is, 2 |", "| bf16, 2 |"))]
    assert rows[0].split("|")[5].strip() == "1.000"
    record = json.loads(table.with_suffix(".json").read_text())
    losses = {sample["contender"]: sample["loss"] for sample in record["samples"]}
    assert losses["bf16, 2"] != losses["as it is, 2"]
    assert losses["bf16, 2"] == pytest.approx(losses["as it is, 2"], rel=0.02)


def test_an_unknown_choice_is_refused(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    assert main(["choices", "--only", "nobody", "--output", str(tmp_path)]) == 1
    assert "--only nobody is unknown; choose from 'as it is, 2'" in caplog.text
