"""Pipelines with several stages on a worker and divided backward passes, real processes over gloo, against a
hand-written loop on one device in float64.

Each number of workers is launched once, and trains with one schedule after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.parallel.pipeline import orders_of
from lockstep.parallel.pipeline_config import choose_pipeline_config

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.usefixtures("one_core")]

PROGRAM = Path(__file__).parent / "programs" / "parallel_schedules.py"
LIMIT_S = 250
# Model, layers, arguments; layers that do not divide evenly among the stages, microbatches that do not fill a round.
EXPERIMENTS: dict[int, list[tuple[str, int, dict[str, Any]]]] = {
    2: [
        ("gpt2", 5, {"pipeline": 2, "schedule": "interleaved", "microbatches": 3}),
        ("llama", 4, {"pipeline": 2, "schedule": "zero_bubble"}),
        ("gpt2", 3, {"pipeline": 2, "schedule": "zero_bubble", "stages_per_worker": 1}),
        ("bert", 5, {"pipeline": 2, "schedule": "zero_bubble_v"}),
    ],
    4: [
        ("bert", 8, {"pipeline": 4, "schedule": "interleaved", "microbatches": 4}),
        ("gpt2", 9, {"pipeline": 4, "schedule": "zero_bubble_v", "microbatches": 5}),
        ("bert", 4, {"pipeline": 2, "data": 2, "schedule": "zero_bubble_v"}),
        ("gpt2", 4, {"pipeline": 2, "tensor": 2, "schedule": "zero_bubble_v"}),
    ],
}
DROPOUT = ("bert", 5, 0.3, {"pipeline": 2, "schedule": "zero_bubble_v"})
IDS = {
    f"{workers}-{name}-" + "-".join(str(value) for value in asked.values()): (workers, number)
    for workers, experiments in EXPERIMENTS.items()
    for number, (name, _, asked) in enumerate(experiments)
}
Pair = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def run(program: Any) -> Callable[[int], list[dict[str, Any]]]:
    """What the schedules compute on a number of workers; launched once."""

    @cache
    def launched(workers: int) -> list[dict[str, Any]]:
        experiments = [(name, layers, 0.0, asked) for name, layers, asked in EXPERIMENTS[workers]]
        twice = [DROPOUT] * 2 if workers == 2 else []
        return ls.launch(program.run_jobs, workers=workers, args=([*experiments, *twice],), timeout_s=LIMIT_S)

    return launched


@pytest.fixture(params=IDS)
def pair(request: pytest.FixtureRequest, run: Callable[[int], Any], one_device: Callable[[str, int], Any]) -> Pair:
    """What a schedule found, and what one device did."""
    workers, number = IDS[request.param]
    name, layers, _ = EXPERIMENTS[workers][number]
    return run(workers)[number], one_device(name, layers)


def close(found: Any, expected: Any) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("what", ["loss", "evaluate", "predict"])
def test_what_comes_out_is_what_comes_out_of_one_device(pair: Pair, what: str):
    found, expected = pair
    assert close(found[what], expected[what])


def test_weights_after_several_updates_are_those_of_one_device(pair: Pair):
    found, expected = pair
    assert list(found["weights"]) == list(expected["weights"])
    assert [name for name, value in expected["weights"].items() if not close(found["weights"][name], value)] == []


@pytest.mark.parametrize("layout", IDS)
def test_workers_do_what_the_schedule_says_one_thing_at_a_time(run: Callable[[int], Any], layout: str):
    workers, number = IDS[layout]
    asked = EXPERIMENTS[workers][number][2]
    table = run(workers)[number]["table"]
    orders = orders_of(
        choose_pipeline_config(
            asked["schedule"], asked.get("microbatches"), asked["pipeline"], asked.get("stages_per_worker")
        )
    )

    assert [[slot.action for slot in slots] for slots in table.workers] == [list(order) for order in orders]
    assert all(one.end <= other.begin for slots in table.workers for one, other in pairwise(slots))
    assert 0 < table.bubble < 1


def test_a_worker_holds_its_stages_alone(run: Callable[[int], Any], one_device: Callable[[str, int], Any]):
    interleaved, v = run(4)[:2]
    assert interleaved["held"] < 0.5 * one_device("bert", 8)["size"]
    assert v["held"] < 0.5 * one_device("gpt2", 9)["size"]


def test_dropout_with_the_same_schedule_twice_gives_the_same_bits(run: Callable[[int], Any]):
    plain, one, other = run(2)[-3:]
    assert one["loss"] == other["loss"]
    assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())
    assert one["loss"] != plain["loss"]
