"""LoRA, bf16 and gradient checkpointing under every strategy and front end give the numbers of one device.

Every training here is held against a loop in plain torch on one device with the whole batch (``programs/fronts.py``).
"""

from __future__ import annotations

import itertools
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from tests.tiers import partly_slow

import lockstep as ls

PROGRAM = str(Path(__file__).parent / "programs" / "fronts.py")
FRONTS = ("loop", "fit", "trainer")
MODES = ("reentrant", "not reentrant")

BF16 = {"dtype": torch.float32, "precision": "bf16"}
# What two workers of two replicas train, by front end.
pytestmark = pytest.mark.usefixtures("one_core")

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{front: (front, {}) for front in FRONTS},
    "frozen ones in the optimizer": ("loop", {"all_parameters": True}),
    "checkpointing": ("fit", {"checkpointing": "not reentrant"}),
    "reentrant checkpointing": ("trainer", {"checkpointing": "reentrant"}),
    "masks": ("trainer", {"dropout": 0.3}),
    "masks, checkpointing": ("trainer", {"dropout": 0.3, "checkpointing": "not reentrant"}),
    "masks, reentrant checkpointing": ("trainer", {"dropout": 0.3, "checkpointing": "reentrant"}),
    "bf16 weights": ("loop", {"dtype": torch.bfloat16}),
    "bf16 forward": ("fit", BF16),
}


@cache
def load() -> Any:
    return SimpleNamespace(**runpy.run_path(PROGRAM, run_name="fronts"))


@pytest.fixture
def fronts() -> Any:
    """What ``programs/fronts.py`` defines."""
    return load()


@cache
def by_hand(**case: Any) -> Any:
    fronts = load()
    return fronts.alone(fronts.Case(**case))


def job(program: str, jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    fronts = SimpleNamespace(**runpy.run_path(program, run_name="fronts"))
    strategy = ls.MultiWorkerMirroredStrategy(seed=3)
    results = {}
    for name, (front, case) in jobs.items():
        outcome = fronts.on(strategy, fronts.Case(**case), front)
        results[name] = (outcome.before, outcome.after, outcome.trained)
    strategy.close()
    return results


@pytest.fixture(scope="module")
def workers() -> dict[str, Any]:
    """What two workers of two replicas came to."""
    fronts = load()
    results = ls.launch(job, workers=2, args=(PROGRAM, JOBS), timeout_s=240)
    return {
        name: fronts.Outcome(before=before, after=after, trained=trained)
        for name, (before, after, trained) in results.items()
    }


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def assert_equal_to_one_device(ours: Any, theirs: Any) -> None:
    """Adapters and head to rounding in double precision, everything else to the bit, under the plain names."""
    assert ours.trained == theirs.trained
    assert any("lora_A" in name for name in ours.trained)
    assert far(ours.after, theirs.after) < 1e-10
    moved = {name for name, value in ours.after.items() if not torch.equal(value, ours.before[name])}
    assert moved == ours.trained


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("replicas", partly_slow([2, 4], 4))
def test_adapters_learn_as_on_one_device(fronts: Any, make_strategy: MakeStrategy, front: str, replicas: int):
    ours = fronts.on(make_strategy(replicas), fronts.Case(), front)
    assert_equal_to_one_device(ours, by_hand())


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("mode", partly_slow(MODES, "reentrant"))
def test_checkpointing_changes_no_number(fronts: Any, make_strategy: MakeStrategy, front: str, mode: str):
    ours = fronts.on(make_strategy(2), fronts.Case(checkpointing=mode), front)
    assert_equal_to_one_device(ours, by_hand())


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("lora", partly_slow([True, False], False))
def test_checkpointing_draws_the_same_masks_again(fronts: Any, make_strategy: MakeStrategy, front: str, lora: bool):
    def weights(mode: str) -> dict[str, torch.Tensor]:
        case = fronts.Case(lora=lora, dropout=0.3, checkpointing=mode)
        return fronts.on(make_strategy(2, seed=3), case, front).after

    plain = weights("no")

    assert all(far(plain, weights(mode)) == 0 for mode in MODES)
    assert far(plain, by_hand(lora=lora).after) > 1e-3  # there were masks


@pytest.mark.parametrize("front", FRONTS)
def test_bf16_in_the_forward_pass_is_as_on_one_device_and_the_same_in_every_run(
    fronts: Any, make_strategy: MakeStrategy, front: str
):
    # Reentrant checkpointing casts inputs of layers twice or once, as another replica's end of autocast falls.
    case = fronts.Case(**BF16, checkpointing="reentrant")
    first, second = (fronts.on(make_strategy(4), case, front) for _ in range(2))
    assert far(first.after, second.after) == 0
    assert_near_in_bf16(first, by_hand(**BF16))


@pytest.mark.parametrize("front", FRONTS)
def test_frozen_bf16_weights_stay_to_the_bit(fronts: Any, make_strategy: MakeStrategy, front: str):
    ours = fronts.on(make_strategy(2), fronts.Case(dtype=torch.bfloat16), front)
    assert_near_in_bf16(ours, by_hand(dtype=torch.bfloat16))


def test_bf16_weights_that_are_trained_are_as_near_to_the_truth_as_on_one_device(
    fronts: Any, make_strategy: MakeStrategy
):
    """Of the first gradients, summed over 4 replicas in bf16; double precision is the truth."""

    def gradients(dtype: torch.dtype, strategy: Any = None) -> torch.Tensor:
        module = fronts.make(fronts.Case(lora=False, dtype=torch.bfloat16)).to(dtype)
        x, y = fronts.batches()[0]
        if strategy is None:
            torch.nn.functional.cross_entropy(module(**x).logits, y).backward()
        else:
            mirrored = strategy.mirror(module)
            optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.0))

            def step(batch: Any) -> None:
                per_example = torch.nn.functional.cross_entropy(mirrored(**batch[0]).logits, batch[1], reduction="none")
                ls.compute_average_loss(per_example).backward()
                optimizer.sum_gradients()

            for batch in strategy.distribute_dataset([(x, y)]):
                strategy.run(step, (batch,))
        return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])

    truth = gradients(torch.float64)
    one = (gradients(torch.bfloat16) - truth).norm() / truth.norm()
    four = (gradients(torch.bfloat16, make_strategy(4)) - truth).norm() / truth.norm()

    assert 1e-4 < one < 0.05
    assert four < 2.5 * one  # three more roundings


def assert_near_in_bf16(ours: Any, theirs: Any) -> None:
    """The adapters' way, all together, ends within a tenth of its length; frozen weights are equal to the bit."""
    names = sorted(ours.trained)
    way = torch.cat([(theirs.after[name] - theirs.before[name]).double().flatten() for name in names])
    apart = torch.cat([(ours.after[name] - theirs.after[name]).double().flatten() for name in names])
    assert 0 < apart.norm() < 0.1 * way.norm()
    assert all(torch.equal(ours.after[name], ours.before[name]) for name in ours.after.keys() - ours.trained)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", [*FRONTS, "frozen ones in the optimizer", "checkpointing", "reentrant checkpointing"])
def test_two_workers_learn_as_one_device(workers: dict[str, Any], name: str):
    theirs = by_hand(all_parameters=True) if name.startswith("frozen") else by_hand()
    assert_equal_to_one_device(workers[name], theirs)


@pytest.mark.slow
@pytest.mark.workers
def test_on_two_workers_checkpointing_draws_the_same_masks_again(workers: dict[str, Any]):
    plain, *others = (workers[name].after for name in workers if name.startswith("masks"))
    assert [far(plain, other) for other in others] == [0, 0]
    assert far(plain, by_hand().after) > 1e-3


@pytest.mark.workers
def test_bf16_on_two_workers(workers: dict[str, Any]):
    assert_near_in_bf16(workers["bf16 weights"], by_hand(dtype=torch.bfloat16))
    assert_near_in_bf16(workers["bf16 forward"], by_hand(**BF16))


def test_the_fronts_differ_by_what_they_are_asked_to(fronts: Any):
    """Else the tests above would say nothing."""
    cases = [{}, {"lora": False}, {"dropout": 0.3}, {"dtype": torch.bfloat16}, BF16]
    ends = [by_hand(**case).after for case in cases]
    for one, other in itertools.combinations(ends, 2):
        assert one.keys() != other.keys() or far(one, other) > 1e-6
