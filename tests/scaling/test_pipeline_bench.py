"""What is asked of a measurement of schedules, and what becomes of its timetables: pure."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import SCHEDULES
from lockstep.parallel.pipeline_trace import Action, Orders, PipelineTrace, Slot, simulate
from lockstep_tools.scaling.machine import Machine
from lockstep_tools.scaling.pipeline_bench import (
    PipelineResult,
    PipelineSettings,
    Sample,
    parse_schedules,
    pipeline_files,
    render_markdown,
    rows_of,
    terminal_table,
    write_pipeline_report,
)

SETTINGS = PipelineSettings(schedules=("1f1b",), microbatches=2, rounds=2, layers=2)
ORDERS: Orders = [
    [Action(kind=kind, stage=0, microbatch=part) for kind in ("forward", "backward") for part in range(2)],
    [Action(kind=kind, stage=1, microbatch=part) for part in range(2) for kind in ("forward", "backward")],
]


def late(table: PipelineTrace, by: float) -> PipelineTrace:
    """The same with the first worker's last action ``by`` longer."""
    first, second = table.workers
    *slots, last = first
    return PipelineTrace(workers=((*slots, Slot(action=last.action, begin=last.begin, end=last.end + by)), second))


@pytest.fixture
def result() -> PipelineResult:
    usual = simulate(ORDERS)
    samples = (
        Sample(schedule="1f1b", round=0, steps=(usual, usual)),
        Sample(schedule="1f1b", round=1, steps=(late(usual, 9.0), late(usual, 9.0), usual)),
    )
    machine = Machine(
        processor="a CPU", cores=2, memory_gb=4, system="Linux", python="3.11", torch="2", transformers="5",
        commit="abc", load=0.1,
    )  # fmt: skip
    return PipelineResult(
        settings=SETTINGS,
        date="2026-01-02",
        machine=machine,
        rows=tuple(rows_of(SETTINGS, samples, {"1f1b": ORDERS})),
    )


def test_the_measured_share_is_beside_those_of_theory(result: PipelineResult):
    (row,) = result.rows
    assert (row.bubble, row.timetable, row.textbook) == (pytest.approx(1 / 3),) * 3
    assert row.step_ms == pytest.approx(9000)
    # The first stage's backward passes took 2, 2, 2, 2, 2 and 2, 2, 2, 11, 11, on average 3.8.
    expected = simulate(ORDERS, lambda each: {"forward": 1.0}.get(each.kind, (3.8, 2.0)[each.stage]))
    assert row.with_costs == pytest.approx(expected.bubble)


def test_the_report_says_what_the_columns_mean_and_shows_a_step(result: PipelineResult, tmp_path: Path):
    markdown, picture = pipeline_files(tmp_path, date=result.date, cores=2)
    write_pipeline_report((markdown, picture), result)
    text = markdown.read_text()
    assert "| 1f1b | 1 | 9000.0 | 33.3% | 33.3% | 33.3% | " in text
    assert "idle: the share of that in which a worker is in no action" in text
    assert "(2026-01-02-pipeline-cpu-2.svg)" in text
    assert ElementTree.parse(picture).getroot() is not None


def test_workers_that_share_cores_are_said_to_show_nothing(result: PipelineResult):
    many = PipelineSettings(schedules=("1f1b",), workers=4, layers=4)
    crowded = PipelineResult(**{**vars(result), "settings": many})
    assert "There are more workers than cores" in render_markdown(crowded, "a.svg")
    assert "There are more workers than cores" in terminal_table(crowded)
    assert "more workers than cores" not in terminal_table(result)


def test_names_of_schedules_are_read_and_kept_in_order():
    assert parse_schedules("zero_bubble, 1f1b") == ("1f1b", "zero_bubble")
    assert parse_schedules(None) == SCHEDULES
    with pytest.raises(ConfigError, match="--schedules='none' is unknown; choose one of 1f1b, gpipe"):
        parse_schedules("none")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"workers": 1}, "workers=1 was given, expected at least 2"),
        ({"layers": 3}, "pipeline=2 with 2 stages on each worker is 4 stages, and the model has 3 layers"),
        ({"microbatches": 1}, "microbatches=1 leave some of 2 workers idle"),
        ({"hidden": 40}, "hidden=40 is no multiple of 32"),
        ({"steps": 0}, "steps=0 was given, expected at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        PipelineSettings(**asked)
