"""Models divided among workers, real processes over gloo, against a hand-written loop on one device in float64.

Each number of workers is launched once, and makes one grid after another; the tests look at what its chief returned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import partly_slow

import lockstep as ls

LIMIT_S = 300
"""For a launch, whose error says where each worker stood; a minute on two cores that have nothing else to do."""
pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("one_core")]

PROGRAM = Path(__file__).parent / "programs" / "parallel.py"
BOTH = ("bert", "gpt2")
# What is launched together: the number of workers, and for each grid of them the model. `make test` runs the first two.
EXPERIMENTS: dict[str, tuple[int, list[tuple[str, dict[str, Any]]]]] = {
    "two": (2, [(name, {axis: 2}) for axis in ("tensor", "pipeline") for name in BOTH]),
    "four": (4, [("bert", {"data": 2, "tensor": 2})]),
    "more of four": (
        4,
        [
            *[(name, {"tensor": 4}) for name in BOTH],
            *[(name, {"pipeline": 4, "microbatches": 4}) for name in BOTH],
            *[(name, {"data": 2, "tensor": 2}) for name in ("gpt2", "llama")],
            ("bert", {"data": 2, "pipeline": 2, "schedule": "gpipe"}),
            ("gpt2", {"data": 2, "pipeline": 2}),
            *[(name, {"pipeline": 2, "tensor": 2}) for name in BOTH],
        ],
    ),
    "eight": (8, [(name, {"data": 2, "pipeline": 2, "tensor": 2}) for name in BOTH]),
}
DROPOUT = [("bert", {"data": 2, "tensor": 2}), ("gpt2", {"pipeline": 2, "tensor": 2})]
IDS = {
    f"{name}-{'-'.join(f'{axis}{degree}' for axis, degree in grid.items())}": (launch, number)
    for launch, (_, experiments) in EXPERIMENTS.items()
    for number, (name, grid) in enumerate(experiments)
}
QUICK = {"bert-tensor2", "gpt2-tensor2", "bert-pipeline2", "gpt2-pipeline2", "bert-data2-tensor2"}


@pytest.fixture(scope="module")
def run(program: Any) -> Callable[[str], list[dict[str, Any]]]:
    """What the grids of a launch compute; launched once."""

    @cache
    def launched(launch: str) -> list[dict[str, Any]]:
        workers, experiments = EXPERIMENTS[launch]
        dropout = DROPOUT if launch == "more of four" else []
        return ls.launch(program.run_jobs, workers=workers, args=(experiments, dropout), timeout_s=LIMIT_S)

    return launched


@pytest.fixture(params=partly_slow(IDS, *(set(IDS) - QUICK)))
def pair(
    request: pytest.FixtureRequest, program: Any, run: Callable[[str], Any], one_device: Callable[[str, int], Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a grid found, and what one device did."""
    launch, number = IDS[request.param]
    name, grid = EXPERIMENTS[launch][1][number]
    return run(launch)[number], one_device(name, program.depth(grid))


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def test_losses_and_metrics_are_those_of_one_device(pair: tuple[dict[str, Any], dict[str, Any]]):
    found, expected = pair
    assert close(found["history"]["loss"], expected["loss"])
    assert close(found["history"]["accuracy"], expected["accuracy"], 1e-6)  # torchmetrics divides in float32
    assert close(found["evaluate"]["loss"], expected["evaluate"])
    assert found["examples"] == [23, 23]


def test_weights_after_several_updates_are_those_of_one_device(pair: tuple[dict[str, Any], dict[str, Any]]):
    found, expected = pair
    assert list(found["weights"]) == list(expected["weights"])
    off = [name for name, value in expected["weights"].items() if not close(found["weights"][name], value)]
    assert off == []


def test_gradients_are_those_of_one_device(pair: tuple[dict[str, Any], dict[str, Any]]):
    found, expected = pair
    assert max(float(value.abs().max()) for value in expected["gradients"].values()) > 1e-2
    off = [name for name, value in expected["gradients"].items() if not close(found["gradients"][name], value)]
    assert off == []


def test_predictions_are_in_the_order_of_the_data(pair: tuple[dict[str, Any], dict[str, Any]]):
    found, expected = pair
    assert close(found["predict"], expected["predict"])


def test_weights_that_were_loaded_are_the_weights(pair: tuple[dict[str, Any], dict[str, Any]]):
    found, _ = pair
    assert all(torch.equal(found["doubled"][name], value * 2) for name, value in found["weights"].items())


def test_all_workers_know_the_same(pair: tuple[dict[str, Any], dict[str, Any]]):
    assert pair[0]["all alike"]


def test_a_closed_strategy_leaves_no_thread(pair: tuple[dict[str, Any], dict[str, Any]]):
    assert pair[0]["threads left"] == 0


@pytest.mark.slow
def test_a_worker_holds_a_part_only(run: Callable[[str], Any], one_device: Callable[[str, int], Any]):
    size = one_device("gpt2", 2)["size"]
    launch, number = IDS["gpt2-pipeline2-tensor2"]
    four, eight = run(launch)[number], run("eight")[1]
    assert four["held"] < 0.4 * size  # a quarter, and what tensor ranks all hold
    assert eight["held"] == four["held"]
    assert eight["replicas"] == 2


@pytest.fixture(scope="module")
def dropped(run: Callable[[str], Any]) -> Any:
    """What two grids of four workers saw of dropout, each twice."""
    launch = "more of four"
    return run(launch)[len(EXPERIMENTS[launch][1]) :]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
def test_dropout_on_the_same_grid_twice_gives_the_same_bits(dropped: list[dict[str, Any]], first: int):
    one, other = dropped[first : first + 2]
    assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())
    assert one["everyones"] == other["everyones"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_number", "pairs", "apart"), [(0, [(0, 1), (2, 3)], [(0, 2)]), (2, [(0, 1), (2, 3)], [(0, 2)])]
)
def test_tensor_ranks_drop_alike_what_is_whole_and_each_its_own_of_what_is_divided(
    dropped: list[dict[str, Any]], run_number: int, pairs: list[tuple[int, int]], apart: list[tuple[int, int]]
):
    seen = dropped[run_number]["everyones"]
    for one, other in pairs:
        assert seen[one][0] == seen[other][0]  # so that what both hold stays equal
        assert seen[one][1]["whole"] == seen[other][1]["whole"] != []
        assert not set(seen[one][1]["part"]) & set(seen[other][1]["part"])
    for one, other in apart:  # replicas, and stages
        assert not set(seen[one][1]["whole"]) & set(seen[other][1]["whole"])
