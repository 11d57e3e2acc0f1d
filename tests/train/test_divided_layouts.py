"""Models that two workers divide: averages of their weights, and losses that they compute, are those of one device."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep as ls

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "divided.py"
LAYOUTS = ["tensor", "pipeline", "sharded weights", "sharded optimizer"]


@pytest.fixture(scope="module")
def program() -> Any:
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="divided"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averages")


@pytest.fixture(scope="module")
def results(program: Any, folder: Path) -> Any:
    return ls.launch(program.job, workers=2, args=(str(folder),), timeout_s=150)


def check(result: Any, program: Any) -> None:
    weights, losses = program.by_hand()
    assert list(result["weights"]) == list(weights)
    for name, expected in weights.items():
        torch.testing.assert_close(result["weights"][name], expected, rtol=1e-9, atol=1e-9)
    assert result["history"]["val_loss"] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_average_of_one_device_and_goes_on_with_its_bits(results: Any, layout: str, program: Any):
    check(results[layout], program)
    again = results[f"{layout} again"]
    assert all(map(torch.equal, again["weights"].values(), results[layout]["weights"].values()))
    assert again["history"] == results[layout]["history"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_goes_on_with_the_average_of_a_layout(results: Any, layout: str, program: Any, folder: Path):
    backups = sorted((folder / layout).glob("step-*"))
    assert [path.name for path in backups] == ["step-00000006"]
    middle = folder / f"{layout} on one"
    shutil.copytree(backups[0], middle / backups[0].name)
    check(program.trained(middle), program)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pipeline"])
def test_the_loss_that_a_model_computes_and_metrics_beside_it_are_those_of_one_device(
    results: Any, layout: str, program: Any
):
    found, one = results[f"{layout} own loss"], program.trained_by_module()
    assert found["history"].keys() == one["history"].keys()
    for name, values in one["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-5)
    for name, expected in one["weights"].items():  # transformers computes its loss in float32
        torch.testing.assert_close(found["weights"][name], expected, rtol=0, atol=1e-6)
