from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.report import write_report
from benchmarks.suites.layouts import (
    LAYOUTS,
    LayoutWork,
    MeasuredLayout,
    Row,
    WorkerMemory,
    measure_in_worker,
    report_of,
)
from benchmarks.trial import Conditions
from lockstep.plan.layout import Layout
from lockstep.plan.memory import Memory
from lockstep.scaling.machine import this_machine

MB = 2**20
CONDITIONS = Conditions(date="2026-11-21", machine=this_machine(), command="the command", warm_up=1, steps=1, rounds=1)


def worker(peak_mb: float) -> WorkerMemory:
    return WorkerMemory(start_mb=10, peak_mb=peak_mb, kept_mb=1.5 * peak_mb, weights_mb=20, optimizer_mb=40)


def row(*peaks_mb: float) -> Row:
    expected = Memory(weights=20 * MB, gradients=20 * MB, optimizer=40 * MB, activations=40 * MB)
    layout = MeasuredLayout(asked={"data": 2, "shard_optimizer": True})
    return Row(layout=layout, workers=tuple(map(worker, peaks_mb)), expected=expected)


def test_the_table_shows_the_fullest_worker_beside_what_is_expected(tmp_path: Path):
    result = report_of(CONDITIONS, LayoutWork(), [row(90, 110)])

    assert "| data=2, shard_optimizer=True | 20 | 40 | 110 | 100 | 1.10 | 20 | 20 | 40 | 40 | 0 |" in result.text
    path = write_report(tmp_path, result)
    record = json.loads(path.with_suffix(".json").read_text())
    assert path.name == f"2026-11-21-layouts-cpu-{CONDITIONS.machine.cores}.md"
    assert [each["peak_mb"] for each in record["rows"][0]["workers"]] == [90, 110]


def test_layouts_are_planned_as_they_run():
    work = LayoutWork(rows=8)
    planned = {layout.name: layout.planned(work) for layout in LAYOUTS}

    assert planned["one worker"] == Layout(microbatch_size=8)
    assert planned["data=4, shard_parameters=True"] == Layout(data=4, microbatch_size=2, shard_parameters=True)
    assert planned["data=2, pipeline=2"] == Layout(data=2, pipeline=2, microbatch_size=1, microbatches=4)
    assert planned["tensor=2, sequence_parallel=True"] == Layout(tensor=2, microbatch_size=8, sequence_parallel=True)
    in_a_v = Layout(pipeline=2, microbatch_size=2, microbatches=4, schedule="zero_bubble_v", stages_per_worker=2)
    assert planned["pipeline=2, schedule=zero_bubble_v"] == in_a_v


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_worker_tells_what_it_has_in_memory():
    work = LayoutWork(layers=1, hidden=256, heads=2, vocabulary=8000, rows=2, tokens=8)
    (found,) = measure_in_worker({}, work, 2)
    weights = (8000 + 8) * 256 + 12 * 256**2 + 13 * 256 + 2 * 256

    assert found["weights_mb"] == pytest.approx(4 * weights / MB)
    assert found["optimizer_mb"] == pytest.approx(8 * weights / MB, rel=1e-3)
    held = 16 * weights / MB  # weights, gradients and Adam's two
    assert found["peak_mb"] > 0.9 * held  # some of it in memory that tests before this one have freed
    assert found["kept_mb"] > 0.9 * held


def test_the_command_names_the_layouts_that_there_are(caplog: pytest.LogCaptureFixture):
    assert main(["layouts", "--only", "data=9"]) == 1
    assert "--only data=9 is unknown; choose from 'one worker', 'data=4', " in caplog.text
