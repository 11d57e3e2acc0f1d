"""Modules of no known family, divided among workers, against a hand-written loop on one device in float64.

One program trains each module on each layout. Each number of workers is launched once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls

LIMIT_S = 300
pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("one_core")]

PROGRAM = Path(__file__).parent / "programs" / "plain_modules.py"
MODULES = ("mlp", "cnn", "vit", "two inputs", "unet")
PLANNED = ("mlp", "vit", "two inputs")
"""Those with a tensor plan."""
EXPERIMENTS: dict[str, tuple[int, list[tuple[str, dict[str, Any]]]]] = {
    "two": (2, [("mlp", {"pipeline": 2})]),
    "more of two": (
        2,
        [
            *[(name, {"pipeline": 2}) for name in MODULES[1:]],
            *[(name, {"tensor": 2}) for name in PLANNED],
            ("unet", {"data": 2}),
            ("vit", {"data": 2, "shard_parameters": True}),
            ("vit", {"pipeline": 2, "schedule": "zero_bubble_v", "shard_optimizer": True}),
        ],
    ),
    "four": (
        4,
        [
            ("cnn", {"data": 2, "pipeline": 2}),
            ("vit", {"pipeline": 2, "tensor": 2}),
            ("two inputs", {"data": 2, "tensor": 2}),
            ("vit", {"pipeline": 4}),
        ],
    ),
    "eight": (8, [(name, {"data": 2, "pipeline": 2, "tensor": 2}) for name in PLANNED]),
}
IDS = {
    f"{name}-{'-'.join(f'{axis}{degree}' for axis, degree in grid.items())}": (launch, number)
    for launch, (_, experiments) in EXPERIMENTS.items()
    for number, (name, grid) in enumerate(experiments)
}


@pytest.fixture(scope="module")
def run(program: Any) -> Callable[[str], list[dict[str, Any]]]:
    """What a launch computes, once."""

    @cache
    def launched(launch: str) -> list[dict[str, Any]]:
        workers, experiments = EXPERIMENTS[launch]
        return ls.launch(program.run_jobs, workers=workers, args=(experiments,), timeout_s=LIMIT_S)

    return launched


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if IDS[each][0] == "two" else pytest.mark.slow) for each in IDS]
)
def test_the_same_program_has_the_numbers_of_one_device(
    one_device: Callable[[str], Any], run: Callable[[str], Any], case: str
):
    launch, number = IDS[case]
    name, _ = EXPERIMENTS[launch][1][number]
    found, expected = run(launch)[number], one_device(name)
    for key in ("loss", "val_loss", "evaluate"):
        assert found[key] == pytest.approx(expected[key], rel=1e-9)
    for key in ("weights", "predict"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-10)
    assert found["all alike"]


REFUSED = {
    "unknown name": ("block.1", "blocks.1"),
    "too few names": ("blocks.1", "4 stages", "3 different names"),
    "wrong order": ("blocks.1, blocks.2, blocks.3", "order"),
    "not called": ("unused", "never called"),
    "too few blocks": ("4 stages", "2 layers"),
    "two lists": ("encoder.layers, decoder.layers", "pipeline_split"),
    "branch": ("Branch", "pipeline_split"),
    "hooks": ("hooks", "Sequential"),
    "unknown in the plan": ("'first'", "Sequential"),
    "no style": ("'0'", "ColwiseParallel()"),
    "style of another kind": ("'0'", "Conv2d", "nn.Linear"),
    "stage without weights": ("worker 0", "['0', '3', '4']"),
    "no list": ("'blocks.1'", "list"),
    "names and numbers": ("['blocks.1', 2, 1]", "list"),
    "object": ("SimpleNamespace", "cannot travel", "another pipeline_split"),
}


@pytest.mark.slow
def test_what_cannot_be_divided_is_one_line_on_all_workers_before_a_weight_is_moved(program: Any):
    found = ls.launch(program.refusals, workers=2, timeout_s=LIMIT_S)
    assert found.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        error, _ = found[name][0]
        assert found[name] == [(error, True)] * (1 if name == "object" else 2)
        assert error.startswith("ConfigError")
        assert "\n" not in error
        assert all(word in error for word in words), error


def test_a_whole_weight_on_divided_activations_is_an_error_and_on_whole_ones_exact(program: Any):
    with pytest.raises(ls.errors.ClusterError, match=r"UsageError.*'1\.weight'.*Replicate"):
        ls.launch(partial(program.train_slopes, gathered=False), workers=2, timeout_s=LIMIT_S)
    weights = ls.launch(partial(program.train_slopes, gathered=True), workers=2, timeout_s=LIMIT_S)
    torch.testing.assert_close(weights, dict(program.slopes_by_hand()), rtol=1e-12, atol=1e-14)
