"""Optimizer state, and whole models, divided among replicas: real processes, against the same grid undivided, bit for
bit, and against a hand-written loop on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lockstep as ls

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.usefixtures("one_core")]

PROGRAM = Path(__file__).parent / "programs" / "parallel_sharding.py"
WORKERS = 4
LIMIT_S = 250
# Model, optimizer, grid. Each is run undivided too.
STATE = {
    "data=4": ("bert", "adamw", {"data": 4}),
    "data=2, tensor=2": ("gpt2", "adagrad", {"data": 2, "tensor": 2}),
    "data=2, pipeline=2": ("gpt2", "foreach", {"data": 2, "pipeline": 2}),
}

# The weights too.
FULL = {"data=4": ("bert", "adamw", {"data": 4}), "data=2, tensor=2": ("gpt2", "adagrad", {"data": 2, "tensor": 2})}


@pytest.fixture(scope="module")
def all_runs(program: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each grid computes with its state whole, and divided, and with its weights divided; all in one job."""
    experiments = [
        (name, optimizer, {**grid, "shard_optimizer": sharded})
        for name, optimizer, grid in STATE.values()
        for sharded in (False, True)
    ]
    experiments += [(name, optimizer, {**grid, "shard_parameters": True}) for name, optimizer, grid in FULL.values()]
    found = iter(ls.launch(program.run_jobs, workers=WORKERS, args=(experiments,), timeout_s=LIMIT_S))
    return {grid: (next(found), next(found)) for grid in STATE}, {grid: next(found) for grid in FULL}


@pytest.fixture(scope="module")
def runs(all_runs: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """A grid's two runs: with its optimizer's state whole, and divided."""
    return all_runs[0]


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest, all_runs: tuple[dict[str, Any], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A grid whose weights are divided among its replicas, and what it computes."""
    return request.param, all_runs[1][request.param]


@pytest.fixture(params=STATE)
def pair(request: pytest.FixtureRequest, runs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A grid with its optimizer's state whole, and divided."""
    whole, divided = runs[request.param]
    return whole, divided


def equal(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
        for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True)
    )


def close(found: Any, expected: Any) -> bool:
    return all(
        torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True)
    )


@pytest.mark.parametrize("what", ["loss", "val_loss", "weights", "predict"])
def test_dividing_the_state_changes_no_bit(pair: tuple[dict[str, Any], dict[str, Any]], what: str):
    whole, divided = pair
    assert equal(divided[what], whole[what])


@pytest.mark.parametrize("grid", STATE)
def test_weights_are_those_of_one_device(runs: dict[str, Any], one_device: Callable[..., Any], grid: str):
    name, optimizer, _ = STATE[grid]
    expected, (_, divided) = one_device(name, optimizer), runs[grid]
    assert close(divided["loss"], expected["loss"])
    assert list(divided["weights"]) == list(expected["weights"])
    assert close(divided["weights"], expected["weights"])


@pytest.mark.parametrize("grid", STATE)
def test_a_worker_keeps_its_share_of_the_state(runs: dict[str, Any], grid: str):
    whole, divided = runs[grid]
    replicas = STATE[grid][2]["data"]
    assert sum(divided["kept"]) * replicas == sum(whole["kept"])
    assert max(divided["kept"]) < 1.25 * max(whole["kept"]) / replicas


def test_the_state_reads_as_if_it_were_whole(pair: tuple[dict[str, Any], dict[str, Any]]):
    whole, divided = pair
    assert divided["state"]["param_groups"] == whole["state"]["param_groups"]
    assert list(divided["state"]["state"]) == list(whole["state"]["state"])
    assert equal(divided["state"]["state"], whole["state"]["state"])


def test_a_state_that_was_loaded_is_the_state(pair: tuple[dict[str, Any], dict[str, Any]]):
    _, divided = pair
    assert equal(divided["loaded"]["state"], divided["state"]["state"])
    assert divided["kept again"]


@pytest.mark.parametrize("grid", ["data=4", "data=2, tensor=2"])
def test_a_loop_of_one_s_own_and_a_hook_change_no_bit(runs: dict[str, Any], grid: str):
    whole, divided = runs[grid]
    assert not equal(whole["by hand"], whole["weights"])
    assert equal(divided["by hand"], whole["by hand"])


def test_with_weights_divided_too_all_is_as_on_one_device(
    full: tuple[str, dict[str, Any]], runs: dict[str, Any], one_device: Callable[..., Any]
):
    grid, found = full
    name, optimizer, _ = FULL[grid]
    expected, (whole, _) = one_device(name, optimizer), runs[grid]
    assert close(found["loss"], expected["loss"])
    assert list(found["weights"]) == list(expected["weights"])
    assert close(found["weights"], expected["weights"])
    for what in ("val_loss", "predict", "by hand"):  # some of these batches have fewer rows than there are replicas
        assert close(found[what], whole[what])


def test_a_worker_holds_its_share_of_the_weights(full: tuple[str, dict[str, Any]], runs: dict[str, Any]):
    grid, found = full
    replicas, (whole, _) = FULL[grid][2]["data"], runs[grid]
    assert sum(found["held"]) * replicas == sum(whole["held"])
    assert max(found["held"]) < 1.25 * max(whole["held"]) / replicas
    assert sum(found["kept"]) * replicas == sum(whole["kept"])


def test_whole_weights_that_are_loaded_are_the_weights(full: tuple[str, dict[str, Any]]):
    _, found = full
    assert all(torch.equal(found["doubled"][name], value * 2) for name, value in found["by hand"].items())
