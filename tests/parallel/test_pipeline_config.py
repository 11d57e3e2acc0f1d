"""How pipelines run, and which stages a worker holds: pure."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipeline_config


def test_without_a_number_there_are_two_microbatches_for_every_stage():
    assert choose_pipeline_config("1f1b", None, 4).microbatches == 8
    assert choose_pipeline_config("gpipe", None, 1).microbatches == 1
    assert choose_pipeline_config("gpipe", 5, 4).microbatches == 5


def test_gpipe_takes_a_shard_whole_too():
    assert choose_pipeline_config("gpipe", 1, 4).microbatches == 1
    for schedule in ("1f1b", "interleaved", "zero_bubble", "zero_bubble_v"):
        with pytest.raises(ConfigError, match="microbatches=1 leave some of 4 workers idle"):
            choose_pipeline_config(schedule, 1, 4)
    with pytest.raises(ConfigError, match="microbatches=True"):
        choose_pipeline_config("gpipe", True, 4)


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="microbatches=2 leave some of 4 workers idle all the time; give at least 4"):
        choose_pipeline_config("1f1b", 2, 4)
    with pytest.raises(ConfigError, match="schedule='zero' is unknown; choose one of 1f1b, gpipe"):
        choose_pipeline_config("zero", None, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", [(0,), (1,), (2,)]),
        ("interleaved", [(0, 3), (1, 4), (2, 5)]),
        ("zero_bubble", [(0, 3), (1, 4), (2, 5)]),
        ("zero_bubble_v", [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_which_stages_a_worker_holds(schedule: ScheduleName, stages: list[tuple[int, ...]]):
    pipelining = choose_pipeline_config(schedule, None, 3)

    assert [pipelining.stages_of(worker) for worker in range(3)] == stages
    assert pipelining.last_worker == (0 if schedule == "zero_bubble_v" else 2)
    assert choose_pipeline_config(schedule, None, 1).stages_of(0) == (0,)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "each", "message"),
    [
        (
            "1f1b",
            None,
            2,
            "stages_per_worker=2 does not go with schedule='1f1b', which has 1 stages on each worker; leave",
        ),
        ("interleaved", None, 1, "stages_per_worker=1 does not go with schedule='interleaved', which has 2 or more"),
        ("zero_bubble_v", None, 3, "stages_per_worker=3 does not go with schedule='zero_bubble_v', which has 2"),
        ("zero_bubble", None, 0, "stages_per_worker=0 does not go with schedule='zero_bubble', which has 1 or more"),
        (
            "interleaved",
            5,
            None,
            "microbatches=5 cannot be taken in equal rounds by 2 workers, .* give a multiple of 2",
        ),
        ("zero_bubble", 7, None, "give a multiple of 2"),
    ],
)
def test_what_a_schedule_cannot_take_is_refused_with_what_it_can(
    schedule: ScheduleName, microbatches: int | None, each: int | None, message: str
):
    with pytest.raises(ConfigError, match=message):
        choose_pipeline_config(schedule, microbatches, 2, each)


def test_several_stages_are_about_pipelines():
    with pytest.raises(ConfigError, match="stages_per_worker=2 is about pipelines, and pipeline=1 is none; leave it"):
        choose_pipeline_config("interleaved", None, 1, 2)
