"""torch's schedules by our names: what each worker does, whether it can be done, and the pictures of the docs."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.parallel.pipeline import orders_of, without_its_log
from lockstep.parallel.pipeline_config import SCHEDULES, ScheduleName, choose_pipeline_config
from lockstep.parallel.pipeline_trace import PipelineTrace, simulate, textbook_bubble

DOCS = Path(__file__).parents[2] / "docs"
TEXTBOOK: tuple[ScheduleName, ...] = ("gpipe", "1f1b")


def table(schedule: ScheduleName, microbatches: int, workers: int, each: int | None = None) -> PipelineTrace:
    return simulate(orders_of(choose_pipeline_config(schedule, microbatches, workers, each)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("microbatches", "workers"), [(2, 2), (4, 2), (8, 4), (6, 3), (5, 5)])
def test_every_worker_does_each_microbatch_once_in_its_own_stages(
    schedule: ScheduleName, microbatches: int, workers: int
):
    pipelining = choose_pipeline_config(schedule, microbatches, workers)
    orders = orders_of(pipelining)
    kinds = ("forward", "inputs", "weights") if schedule.startswith("zero") else ("forward", "backward")

    for worker, order in enumerate(orders):
        assert sorted((each.kind, each.stage, each.microbatch) for each in order) == sorted(
            (kind, stage, microbatch)
            for kind in kinds
            for stage in pipelining.stages_of(worker)
            for microbatch in range(microbatches)
        )
    assert simulate(orders).length >= 3 * microbatches  # nobody waits in a circle


@pytest.mark.parametrize("schedule", TEXTBOOK)
@pytest.mark.parametrize(("microbatches", "workers"), [(2, 2), (8, 4), (5, 3)])
def test_gpipe_and_1f1b_have_the_bubble_of_the_textbook(schedule: ScheduleName, microbatches: int, workers: int):
    assert table(schedule, microbatches, workers).bubble == pytest.approx(textbook_bubble(workers, microbatches))


def test_every_further_schedule_has_a_smaller_bubble():
    bubbles = {schedule: table(schedule, 8, 4).bubble for schedule in SCHEDULES}

    assert bubbles["zero_bubble_v"] <= bubbles["zero_bubble"] < bubbles["interleaved"] < bubbles["1f1b"]
    # Narayanan et al. 2021, section 2.2: of the ideal time (S-1)/(v M), so here 3/16.
    assert bubbles["interleaved"] == pytest.approx((3 / 16) / (1 + 3 / 16))
    assert table("interleaved", 8, 4, 4).bubble < bubbles["interleaved"]
    assert table("zero_bubble", 8, 4, 1).bubble < bubbles["1f1b"]


def test_the_pictures_of_the_docs_are_those_of_the_schedules():
    drawing: Any = SimpleNamespace(**runpy.run_path(str(DOCS / "figures" / "draw_schedules.py"), run_name="drawing"))
    drawn = drawing.pictures()

    kept = {path.name: path.read_text() for path in (DOCS / "figures" / "schedules").glob("*.svg")}
    assert kept == drawn, "run python docs/figures/draw_schedules.py"
    page = (DOCS / "concepts" / "schedules.md").read_text()
    for schedule in SCHEDULES:
        assert f"(../figures/schedules/{schedule}.svg)" in page
        assert f"| `{schedule}` | {100 * table(schedule, drawing.MICROBATCHES, drawing.WORKERS).bubble:.1f}% |" in page


def test_torch_s_log_of_a_pass_is_left_out(caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    with caplog.at_level(logging.ERROR, log.name):
        log.addHandler(caplog.handler)
        try:
            with without_its_log(), without_its_log():
                log.error("inside")
            log.error("after")
        finally:
            log.removeHandler(caplog.handler)

    assert {record.getMessage() for record in caplog.records} == {"after"}
