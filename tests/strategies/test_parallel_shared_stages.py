"""Pipelines whose weights, gradients and state replicas share, real processes over gloo, against a hand-written loop on
one device in float64.

Each number of workers is launched once, and trains with one schedule after another.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lockstep as ls
from lockstep.checkpoint.format import read_checkpoint

LIMIT_S = 240
pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 30)]

PROGRAM = Path(__file__).parent / "programs" / "parallel_shared_stages.py"
SHARED = {"data": 2, "pipeline": 2, "shard_parameters": True}
V = {**SHARED, "schedule": "zero_bubble_v"}  # whose first worker has both stages that share a weight
EXPERIMENTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    4: [
        ("bert", SHARED),
        ("gpt2", {**SHARED, "schedule": "gpipe"}),
        ("gpt2", {**SHARED, "schedule": "interleaved"}),
        ("bert", {**SHARED, "schedule": "zero_bubble"}),
        ("gpt2", V),
    ],
    8: [("bert", {**V, "tensor": 2}), ("gpt2", {**SHARED, "tensor": 2})],
}
DROPOUT = [("bert", SHARED), ("gpt2", V)]
WATCHED = [SHARED, {**SHARED, "schedule": "interleaved"}, {**SHARED, "schedule": "zero_bubble"}]
IDS = {
    f"{workers}-{name}-{grid.get('schedule', '1f1b')}": (workers, number)
    for workers, experiments in EXPERIMENTS.items()
    for number, (name, grid) in enumerate(experiments)
}
Pair = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def program() -> Any:
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="parallel_shared_stages"))


@pytest.fixture(scope="module")
def run(program: Any) -> Callable[[int], list[Any]]:
    """What the grids of a number of workers compute; launched once."""

    @cache
    def launched(workers: int) -> list[Any]:
        more = (DROPOUT, WATCHED) if workers == 4 else ([], [])
        return ls.launch(program.run_jobs, workers=workers, args=(EXPERIMENTS[workers], *more), timeout_s=LIMIT_S)

    return launched


@pytest.fixture(scope="module")
def one_device(program: Any) -> Callable[[str, int], dict[str, Any]]:
    return cache(program.one_device)


@pytest.fixture(params=IDS)
def pair(
    request: pytest.FixtureRequest, program: Any, run: Callable[[int], Any], one_device: Callable[[str, int], Any]
) -> Pair:
    """What a grid found, and what one device did."""
    workers, number = IDS[request.param]
    name, grid = EXPERIMENTS[workers][number]
    return run(workers)[number], one_device(name, program.depth(grid))


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert list(found) == list(expected)
    return [name for name, value in expected.items() if not close(found[name], value)]


def test_what_comes_out_is_what_comes_out_of_one_device(pair: Pair):
    found, expected = pair

    assert close(found["history"]["loss"], expected["loss"])
    assert close(found["history"]["accuracy"], expected["accuracy"], 1e-6)  # torchmetrics divides in float32
    assert close(found["evaluate"]["loss"], expected["evaluate"])
    assert close(found["predict"], expected["predict"])
    assert found["all alike"]


def test_weights_and_gradients_are_those_of_one_device(pair: Pair):
    found, expected = pair

    assert far(found["weights"], expected["weights"]) == []
    assert [name for name, value in expected["gradients"].items() if not close(found["gradients"][name], value)] == []
    assert all(torch.equal(found["doubled"][name], value * 2) for name, value in found["weights"].items())


@pytest.mark.parametrize("first", [0, 2])
def test_dropout_on_the_same_grid_twice_gives_the_same_bits(run: Callable[[int], Any], first: int):
    begin = len(EXPERIMENTS[4]) + first
    one, other = run(4)[begin : begin + 2]

    assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())


@pytest.fixture(scope="module")
def watched(run: Callable[[int], Any]) -> list[dict[str, Any]]:
    """What the chief gathered with each of the schedules that were watched."""
    return run(4)[-len(WATCHED) :]


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_is_gathered_at_a_time(watched: list[dict[str, Any]], number: int):
    found = watched[number]

    assert set(found["seen"]["forward"]) == set(found["seen"]["backward"]) == {found["layer"]}
    assert found["afterwards"] == 0


def test_a_backward_pass_in_two_keeps_the_stage_gathered(watched: list[dict[str, Any]]):
    found = watched[2]

    assert set(found["seen"]["forward"]) == {2 * found["held"]}  # of two replicas
    assert found["afterwards"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def moved(program: Any, folder: Path) -> dict[str, Any]:
    """Trainings that went on from each other's checkpoints."""
    program.trained("gpt2", str(folder), kept_in="one kept")
    program.pick(SimpleNamespace(workers=ls.get_strategy().workers), str(folder), "one kept", "one")
    return ls.launch(program.move, workers=4, args=(str(folder),), timeout_s=LIMIT_S)


def test_checkpoints_move_between_layouts(program: Any, folder: Path, moved: dict[str, Any]):
    expected = program.trained_by_hand("gpt2")
    same, again = (moved[name]["weights"] for name in ("undisturbed", "again"))

    assert all(torch.equal(again[name], value) for name, value in same.items())
    for name in ("again", "on the v", "from one"):
        assert far(moved[name]["weights"], expected) == []
    assert far(program.trained("gpt2", str(folder), resumed_from="shared")["weights"], expected) == []


def test_a_checkpoint_is_exported_as_one_file(program: Any, folder: Path, moved: dict[str, Any]):
    ls.export_weights(folder / "kept", folder / "model.safetensors")
    whole = read_checkpoint(folder / "kept" / "step-00000008").weights["model"]

    exported = load_file(folder / "model.safetensors")
    assert exported.keys() >= whole.keys() - {"lm_head.weight"}  # tied
    assert [name for name, value in exported.items() if not torch.equal(whole[name], value)] == []
