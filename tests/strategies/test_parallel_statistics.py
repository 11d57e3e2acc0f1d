"""Divided models: modules that keep something of their rows, and losses that read weights, are those of one device.

Or they are refused or warned of at once, on all workers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls

LIMIT_S = 120
pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("one_core")]
PROGRAM = Path(__file__).parent / "programs" / "statistics.py"


@pytest.mark.parametrize(
    "kinds", [("batch norm",), pytest.param(("spectral norm", "group norm"), marks=pytest.mark.slow)]
)
def test_modules_that_keep_something_of_microbatches_are_warned_of_and_equal_in_one(
    program: Any, kinds: tuple[str, ...]
):
    found = ls.launch(program.train_kinds, workers=2, args=(kinds,), timeout_s=LIMIT_S)
    for kind in kinds:
        assert found[kind] == [(True, False) if kind != "group norm" else (False, True)] * 2
        assert found[f"{kind}, whole"] == [(False, True)] * 2


@pytest.mark.parametrize(
    ("schedule", "plain"), [("1f1b", False), pytest.param("zero_bubble", True, marks=pytest.mark.slow)]
)
def test_a_pipeline_refuses_a_loss_that_reads_weights(program: Any, schedule: str, plain: bool):
    train = partial(program.fit_with_penalty, {"pipeline": 2, "schedule": schedule}, plain=plain)
    with pytest.raises(ls.errors.ClusterError, match=r"UsageError: the loss reads weights of the model.*weight_decay="):
        ls.launch(train, workers=2, timeout_s=LIMIT_S)


TENSOR, SHARDED = {"tensor": 2}, {"data": 2, "shard_parameters": True}


@pytest.mark.parametrize(
    ("name", "grid", "plain"),
    [
        ("loop_with_penalty", TENSOR, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("loop_with_penalty", TENSOR, True),
                ("loop_with_penalty", SHARDED, False),
                ("loop_with_penalty", SHARDED, True),
                ("fit_with_penalty", TENSOR, False),
                ("fit_with_penalty", SHARDED, False),
            ]
        ),
    ],
)
def test_a_penalty_on_parts_of_weights_is_refused(program: Any, name: str, grid: dict[str, Any], plain: bool):
    what = (
        "step computes with a weight that the layout divides" if plain else "loss reads a weight of which this worker"
    )
    with pytest.raises(ls.errors.ClusterError, match=f"UsageError: the {what}.*weight_decay="):
        ls.launch(partial(getattr(program, name), grid, plain=plain), workers=2, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [{"pipeline": 2}, {"tensor": 2}, {"data": 2, "shard_parameters": True}])
def test_the_optimizer_s_decay_is_that_penalty(program: Any, grid: dict[str, Any]):
    weights = ls.launch(partial(program.decay, grid), workers=2, timeout_s=LIMIT_S)
    expected = program.one_device("group norm", weight_decay=0.2)
    torch.testing.assert_close(weights, dict(expected), rtol=1e-9, atol=1e-12)
