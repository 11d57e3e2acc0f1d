"""Types of transformers' models, divided by their own plans or kept specs, against a hand-written loop on one device.

All in float64. Each number of workers is launched once, and trains one type after another on one grid after another.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls

LIMIT_S = 400
PROGRAM = Path(__file__).parent / "programs" / "model_types.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.workers,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.usefixtures("one_core"),
]

Found = dict[str, tuple[list[float], dict[str, Tensor]]]
TYPES = list(runpy.run_path(str(PROGRAM), run_name="model_types")["TYPES"])
GRIDS: dict[str, dict[str, Any]] = {
    "tensor2": {"tensor": 2},
    "pipeline2": {"pipeline": 2},
    "data2-tensor2": {"data": 2, "tensor": 2},
    "pipeline2-tensor2": {"pipeline": 2, "tensor": 2},
    "data2-pipeline2-tensor2": {"data": 2, "pipeline": 2, "tensor": 2},
}
WITHOUT_STAGES = ("llama4_text",)
"""Types without a pipeline plan."""
LAUNCHES = {
    2: ("tensor2", "pipeline2"),
    4: ("data2-tensor2", "pipeline2-tensor2"),
    8: ("data2-pipeline2-tensor2",),
}


def types_on(grid: str) -> list[str]:
    return [name for name in TYPES if not ("pipeline" in grid and name in WITHOUT_STAGES)]


@pytest.fixture(scope="module")
def run(program: Any) -> Callable[[str], Found]:
    """What a grid finds; all grids of one number of workers are launched together, once."""

    @cache
    def launch(workers: int) -> dict[str, Found]:
        experiments = [(name, GRIDS[name], types_on(name)) for name in LAUNCHES[workers]]
        found: dict[str, Found] = ls.launch(program.run_jobs, workers=workers, args=(experiments,), timeout_s=LIMIT_S)
        return found

    return lambda grid: launch(next(workers for workers, grids in LAUNCHES.items() if grid in grids))[grid]


@pytest.mark.parametrize(("grid", "name"), [(grid, name) for grid in GRIDS for name in types_on(grid)])
def test_losses_and_weights_after_several_updates_are_those_of_one_device(
    run: Callable[[str], Found], one_device: Callable[[str], Any], grid: str, name: str
):
    losses, weights = run(grid)[name]
    expected, whole = one_device(name)
    assert losses == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert list(weights) == list(whole)
    torch.testing.assert_close(weights, whole, rtol=1e-9, atol=1e-9)
