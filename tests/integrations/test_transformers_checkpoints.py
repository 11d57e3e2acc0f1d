"""Checkpoints of the Trainer: what is kept, and how a training goes on from one, here or in transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy

transformers = pytest.importorskip("transformers")

from lockstep.integrations.transformers import Trainer  # noqa: E402  what it needs is there

SAVING = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def resumed(task: Any, folder: Path, step: int) -> Any:
    return replace(task, resume=str(folder / f"checkpoint-{step}"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rerun_and_a_resumed_run_are_bit_equal_with_dropout(tiny: Any, make_strategy: MakeStrategy, tmp_path: Path):
    task = tiny.Task(model=lambda: tiny.model(dropout=0.3), args=SAVING, more={"compute_metrics": tiny.accuracy})
    undisturbed = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "a"))
    again = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2, seed=5), folder=str(tmp_path / "b"))
    tiny.assert_same(again, undisturbed, far=0)
    for step in (2, 4):  # in the middle of an epoch of 3 steps
        going = resumed(task, tmp_path / "a", step)
        gone_on = tiny.train(going, Trainer, replicas=2, strategy=make_strategy(2, seed=5), folder=str(tmp_path / "c"))
        tiny.assert_same(gone_on, undisturbed, far=0)


class Drawing(torch.utils.data.Sampler[int]):
    """Shuffles by a generator of Python's."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, random.Random(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(self.size), self.size))

    def __len__(self) -> int:
        return self.size


def with_sampler(base: type) -> type:
    class Sampled(base):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return Drawing(len(self.train_dataset))

    return Sampled


@pytest.mark.slow
def test_a_resumed_run_has_the_order_of_a_sampler_that_draws_by_itself(
    tiny: Any, make_strategy: MakeStrategy, tmp_path: Path
):
    saving = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    task = tiny.Task(args=saving, trainer=with_sampler)
    undisturbed = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "a"))
    for step in (2, 5, 6):  # in the middle of an epoch of 3 steps, and at its end
        going = resumed(task, tmp_path / "a", step)
        gone_on = tiny.train(going, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "c"))
        tiny.assert_same(gone_on, undisturbed, far=0)


@pytest.mark.slow
def test_a_collator_that_draws_is_right_after_an_epoch_and_is_named_in_its_middle(
    tiny: Any, make_strategy: MakeStrategy, tmp_path: Path
):
    def drawing() -> Callable[[Any], Any]:
        rng = random.Random(3)

        def collate(rows: Any) -> Any:
            batch = tiny.collate(rows)
            return {**batch, "labels": batch["labels"] ^ (rng.random() < 0.5)}

        return collate

    def task(**args: Any) -> Any:
        return tiny.Task(args={"num_train_epochs": 2, **args}, more={"data_collator": drawing()})

    epochs = task(save_strategy="epoch")
    undisturbed = tiny.train(epochs, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "a"))
    going = resumed(task(save_strategy="epoch"), tmp_path / "a", 3)
    gone_on = tiny.train(going, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "b"))
    tiny.assert_same(gone_on, undisturbed, far=0)

    steps = task(save_strategy="steps", save_steps=2)
    with pytest.warns(UserWarning, match=r"saved without collate_fn.*rng \(Random\)"):
        tiny.train(steps, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "c"))


@pytest.mark.slow
def test_going_on_elsewhere_draws_other_numbers_and_the_same_each_time(
    tiny: Any, make_strategy: MakeStrategy, tmp_path: Path
):
    task = tiny.Task(model=lambda: tiny.model(dropout=0.3), args=SAVING)
    tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "a"))
    going = resumed(task, tmp_path / "a", 4)
    runs = [
        tiny.train(going, Trainer, replicas=4, strategy=make_strategy(4, seed=seed), folder=str(tmp_path / "b"))
        for seed in (0, 1)
    ]
    tiny.assert_same(runs[1], runs[0], far=0)


@pytest.mark.slow
def test_one_goes_on_from_the_other_and_on_another_number_of_replicas(
    tiny: Any, make_strategy: MakeStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    task = tiny.Task(args=SAVING)
    theirs = tiny.train(task, transformers.Trainer, folder=str(tmp_path / "theirs"))
    ours = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "ours"))
    tiny.assert_same(ours, theirs)

    assert names(tmp_path / "ours") == names(tmp_path / "theirs") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    added = set(names(tmp_path / "ours" / "checkpoint-4")) ^ set(names(tmp_path / "theirs" / "checkpoint-4"))
    assert added == {"lockstep_rng_state.pth", "lockstep_conditions.json", "lockstep_data_state.pth"}
    from_theirs = resumed(task, tmp_path / "theirs", 2)
    from_ours = resumed(task, tmp_path / "ours", 2)
    for going, base, more in (
        (from_theirs, Trainer, {"replicas": 4, "strategy": make_strategy(4)}),
        (from_ours, Trainer, {"replicas": 4, "strategy": make_strategy(4)}),
        (from_ours, transformers.Trainer, {}),
    ):
        tiny.assert_same(tiny.train(going, base, folder=str(tmp_path / "on"), **more), theirs)
    (line,) = [line for line in caplog.messages if "replicas was" in line]
    assert "replicas was 2, is 4" in line
    assert "rounding" in line


@pytest.mark.slow
def test_the_best_model_is_kept_and_loaded(tiny: Any, make_strategy: MakeStrategy, tmp_path: Path, layout: str):
    settings = {
        **SAVING,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "spread",
        "greater_is_better": False,
        "learning_rate": 0.02,
    }
    task = tiny.Task(args=settings, more={"compute_metrics": tiny.accuracy})
    theirs = tiny.train(task, transformers.Trainer, folder=str(tmp_path / "theirs"))

    ours = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2), folder=str(tmp_path / "ours"))

    tiny.assert_same(ours, theirs)
    best = Path(theirs.trainer.state.best_model_checkpoint).name
    assert best != "checkpoint-6"
    assert Path(ours.trainer.state.best_model_checkpoint).name == best
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ours" / best, dtype=torch.float64)
    torch.testing.assert_close(dict(saved.state_dict()), ours.weights, rtol=0, atol=0)
    for copy in ours.trainer.model_wrapped.copies:  # before an evaluation makes new ones
        torch.testing.assert_close(dict(copy.state_dict()), ours.weights, rtol=0, atol=0)
    metrics = ours.trainer.evaluate()
    assert metrics["eval_spread"] == pytest.approx(ours.trainer.state.best_metric, rel=1e-9)
    assert metrics["eval_spread"] == pytest.approx(theirs.trainer.evaluate()["eval_spread"], rel=1e-9)
