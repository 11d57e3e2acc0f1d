"""More layouts, more kernels and the Trainer of the Transformers integration: the same bits after every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.workers, pytest.mark.slow]

FOUR: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # each worker's devices, and its replicas
    "2 + 1 + 1": ((1, 1, 1), (2, 1, 1)),
    "1 process with 4 devices": ((4,), (4,)),
    "2 + 2": ((1, 2), (2, 2)),
    "1 + 1 + 1 + 1": ((1, 1, 1, 1), (1, 1, 1, 1)),
}
BACKED_UP = "2 + 1 + 1"
OTHERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "8 in 1 process with 3 devices": ((3,), (8,)),
    "2 + 2 + 1 + 2 + 1": ((1, 1, 1, 1, 1), (2, 2, 1, 2, 1)),
    "3 + 5": ((1, 2), (3, 5)),
    "5 in 1 process with 2 devices": ((2,), (5,)),
    "3 + 2": ((1, 1), (3, 2)),
    "2 + 2 + 1": ((1, 1, 1), (2, 2, 1)),
    "6 in 1 process with 4 devices": ((4,), (6,)),
    "2 + 1 + 2 + 1": ((1, 1, 1, 1), (2, 1, 2, 1)),
}


@pytest.mark.parametrize("layout", OTHERS)
def test_any_number_of_replicas_has_the_bits_of_one_device(layout: str, run_layout: Callable[..., Any]):
    devices, replicas = OTHERS[layout]
    assert run_layout(devices, replicas, "few").differences(run_layout((1,), (sum(replicas),), "few")) == {}


@pytest.fixture(scope="module")
def layouts(run_layout: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one device, and the layouts of four replicas, come to: one job each trains all there is.

    One layout is backed up in the middle, and the others go on from that backup.
    """
    folder, kind = (
        tmp_path_factory.mktemp("backups"),
        "kernels and trainers" if find_spec("transformers") else "kernels",
    )
    outcomes = {}
    for name, layout in {"one device": ((1,), (4,)), **FOUR}.items():
        backup = folder / name / "backup"
        if name not in ("one device", BACKED_UP):
            shutil.copytree(folder / BACKED_UP / "kept", backup)
        outcomes[name] = run_layout(*layout, kind, str(backup))
    return outcomes


@pytest.mark.parametrize("layout", FOUR)
def test_kernels_and_the_trainer_have_the_bits_of_one_device(layout: str, layouts: dict[str, Any]):
    differences = layouts[layout].differences(layouts["one device"])
    differences.pop("backed up", None)
    assert differences == {}


@pytest.mark.parametrize("layout", FOUR)
def test_a_backup_is_resumed_on_any_layout_with_the_bits_of_a_training_that_never_stopped(
    layout: str, layouts: dict[str, Any]
):
    outcome, whole = layouts[layout], layouts["one device"]
    passed = len(whole.states["backed up"]) - len(outcome.states["backed up"])
    assert passed == (0 if layout == BACKED_UP else 4)
    assert "backed up" not in outcome.differences(whole)
