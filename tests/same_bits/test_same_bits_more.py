"""More layouts, more kernels and the Trainer of the Transformers integration: the same bits after every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.workers, pytest.mark.slow]

FOUR: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # each worker's devices, and its replicas
    "1 process with 4 devices": ((4,), (4,)),
    "2 + 2": ((1, 2), (2, 2)),
    "1 + 1 + 1 + 1": ((1, 1, 1, 1), (1, 1, 1, 1)),
    "2 + 1 + 1": ((1, 1, 1), (2, 1, 1)),
}
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


@pytest.mark.parametrize("layout", FOUR)
def test_kernels_do_not_depend_on_where_their_operands_lie(layout: str, run_layout: Callable[..., Any]):
    assert run_layout(*FOUR[layout], "kernels").differences(run_layout((1,), (4,), "kernels")) == {}


@pytest.mark.parametrize("layout", FOUR)
def test_the_trainer_has_the_bits_of_one_device(layout: str, run_layout: Callable[..., Any]):
    pytest.importorskip("transformers")
    assert run_layout(*FOUR[layout], "trainers").differences(run_layout((1,), (4,), "trainers")) == {}


def test_a_backup_is_resumed_on_any_layout_with_the_bits_of_a_training_that_never_stopped(
    run_layout: Callable[..., Any], tmp_path: Path
):
    whole = run_layout(*FOUR["2 + 1 + 1"], "backed up", str(tmp_path / "backup"))
    for layout in ("1 process with 4 devices", "2 + 2", "1 + 1 + 1 + 1"):
        folder = tmp_path / layout / "backup"
        shutil.copytree(tmp_path / "kept", folder)
        resumed = run_layout(*FOUR[layout], "backed up", str(folder))
        assert len(resumed.states["backed up"]) == len(whole.states["backed up"]) - 4
        assert resumed.differences(whole) == {}
