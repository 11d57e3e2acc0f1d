from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.report import report_of
from benchmarks.results import figures_of
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.suites.layouts import (
    LAYOUTS,
    LayoutWork,
    contenders,
    expected_mb,
    name_of,
    planned,
    section_of,
    train_in_layout,
)
from benchmarks.trial import Trial, Workload
from lockstep.replicas.cpu.memory import keep_freed_memory
from lockstep_tools.plan.division import Division

MB = 2**20


def test_the_table_shows_the_fullest_worker_beside_what_is_expected(make):
    chosen = [each for each in contenders(LayoutWork()) if each.name == "data=4"]
    workers = tuple({"peak_mb": peak_mb, "weights_mb": 20.0, "optimizer_mb": 40.0} for peak_mb in (90.0, 1110.0))
    sample = replace(make.sample("data=4", 1.0), workload="gpt2", extra=workers)
    figures = figures_of(chosen, [sample], "gpt2")
    text = report_of("layouts", make.conditions(), "Layouts", [section_of(LayoutWork(), figures)], [sample]).text

    expected = expected_mb({"data": 4}, LayoutWork())
    assert f"| data=4 | 20 | 40 | 1,110 | {expected:.0f} | {1110 / expected:.2f} |" in text


def test_layouts_are_planned_as_they_run():
    work = LayoutWork(rows=8)
    found = {name_of(layout): planned(layout, work) for layout in LAYOUTS}

    assert found["one worker"] == Division(microbatch_size=8)
    assert found["data=4, shard_parameters=True"] == Division(data=4, microbatch_size=2, shard_parameters=True)
    assert found["data=2, pipeline=2"] == Division(data=2, pipeline=2, microbatch_size=1, microbatches=4)
    assert found["tensor=2, sequence_parallel=True"] == Division(tensor=2, microbatch_size=8, sequence_parallel=True)
    in_a_v = Division(pipeline=2, microbatch_size=2, microbatches=4, schedule="zero_bubble_v", stages_per_worker=2)
    assert found["pipeline=2, schedule=zero_bubble_v"] == in_a_v
    assert {each.name: each.processes for each in contenders(work)}["data=2, pipeline=2"] == 4


@pytest.fixture
def freed_memory_is_kept() -> Iterator[None]:
    """As before the test, whose worker gives it back at once."""
    yield
    keep_freed_memory()


@pytest.mark.usefixtures("freed_memory_is_kept", "one_core")
def test_a_worker_reports_what_it_has_in_memory():
    work = LayoutWork(layers=1, hidden=256, heads=2, vocabulary=8000, rows=2, tokens=8)
    trial = Trial(workload=Workload(name="gpt2", title=""), contender=contenders(work)[0], warm_up=1, steps=1, cores=2)
    records: list[StepRecord] = []
    timer = StepTimer(warm_up=1, steps=1, started_s=time.monotonic(), report=records.append)
    train_in_layout(trial, None, timer, layout={}, work=work)  # type: ignore[arg-type]
    found = records[0].extra
    weights = (8000 + 8) * 256 + 12 * 256**2 + 13 * 256 + 2 * 256

    assert found["weights_mb"] == pytest.approx(4 * weights / MB)
    assert found["optimizer_mb"] == pytest.approx(8 * weights / MB, rel=1e-3)
    held = 16 * weights / MB  # weights, gradients and Adam's two
    assert found["peak_mb"] > 0.9 * held  # some of it in memory that tests before this one have freed
