"""An EMA of a model that two workers divide: the average of one device, resumed with the same bits, and elsewhere."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep as ls

pytestmark = pytest.mark.workers

PROGRAM = Path(__file__).parent / "programs" / "averaged.py"
LAYOUTS = ["tensor", "pipeline", "sharded weights", "sharded optimizer"]


@pytest.fixture(scope="module")
def program() -> Any:
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="averaged"))


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
