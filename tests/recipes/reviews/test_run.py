from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.conftest import MakeStrategy
from tests.recipes.reviews.conftest import MakeConfig
from transformers import TrainerCallback, pipeline
from transformers.utils import logging

from lockstep.errors import CheckpointError, ConfigError, NonFiniteLossError
from lockstep.strategies.base import Strategy
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.task import build_reviews
from lockstep_tools.recipes.reviews.train import ReviewsResult, check_resume, newest_checkpoint, train_reviews
from lockstep_tools.recipes.training import ResumeCheck


def train(config: ReviewsConfig, strategy: Strategy, **others) -> ReviewsResult:
    return train_reviews(config, build_reviews(config), strategy, **others)


def test_two_replicas_learn_and_answer_and_leave_a_model_that_pipeline_reads(
    tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    places = {f"{name}_dir": tmp_path / name for name in ("checkpoint", "log", "output")}

    result = train(tiny(epochs=5), make_strategy(2), texts=["书不错。", "服务很差。"], **places)

    assert set(result.history.history) == {"loss", "val_loss", "val_accuracy", "val_f1"}
    assert [timing.steps for timing in result.history.timing] == [8] * 5
    assert [timing.examples for timing in result.history.timing] == [80] * 5
    assert result.history.history["loss"][4] < 0.3
    assert result.test_metrics["f1"] > 0.8
    assert [answer.label for answer in result.classified] == ["好评！", "差评！"]
    ask = pipeline("text-classification", model=str(tmp_path / "output"))
    theirs = [ask(text)[0] for text in ("书不错。", "服务很差。")]
    assert [(a.label, pytest.approx(a.score)) for a in result.classified] == [(t["label"], t["score"]) for t in theirs]
    assert len(list((tmp_path / "checkpoint").iterdir())) == 3
    assert list((tmp_path / "log" / "train").glob("events.out.tfevents*"))


@pytest.mark.slow
def test_the_best_epoch_is_tested_and_not_the_last(
    tiny: MakeConfig, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    config = tiny(epochs=3)
    task = build_reviews(config)
    weights: list[torch.Tensor] = []
    # Were F1 better the earlier it is measured, the first epoch would be the best.
    scores = iter([0.9, 0.5, 0.4, 0.0])
    monkeypatch.setattr(
        "lockstep_tools.recipes.reviews.trainer.compute_metrics", lambda _: {"accuracy": 0.5, "f1": next(scores)}
    )

    class Watch(TrainerCallback):
        def on_epoch_end(self, args, state, control, model=None, **_):
            weights.append(model.classifier.weight.detach().clone())

    result = train_reviews(config, task, make_strategy(2), callbacks=[Watch()])

    assert result.best_epoch == 1
    assert torch.equal(task.model.classifier.weight, weights[0])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_the_same_run_twice_gives_the_same_numbers(tiny: MakeConfig, make_strategy: MakeStrategy):
    config = tiny(epochs=1, dropout=0.3, hide=0.3)
    first, second = (train(config, make_strategy(2)) for _ in range(2))
    assert first.history.history == second.history.history
    assert first.test_metrics == second.test_metrics


@pytest.mark.slow
def test_a_run_that_goes_on_ends_where_one_without_a_break_ends(
    tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    config, logs = tiny(epochs=2, dropout=0.3, hide=0.3), tmp_path / "logs"

    whole = train(config, make_strategy(2), checkpoint_dir=tmp_path / "checkpoints", log_dir=logs)
    for file in logs.rglob("events.*"):  # as of an earlier second, since readers sort them by name
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    again = train(config, make_strategy(2), resume=tmp_path / "checkpoints" / "checkpoint-8", log_dir=logs)

    assert (again.history.epoch, again.history.history) == (whole.history.epoch, whole.history.history)
    assert list(again.history.history) == list(whole.history.history)
    assert [timing.epoch for timing in again.history.timing] == [0, 1]
    assert again.best_epoch == whole.best_epoch
    events = EventAccumulator(str(logs / "train"))
    events.Reload()
    assert [event.step for event in events.Scalars("batch_loss")] == [8, 10, 16]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:the position in the data is saved without")
@pytest.mark.parametrize(("update", "saved"), [(10, 11), (7, 8)], ids=["in an epoch", "at its end"])
def test_after_sigterm_a_run_has_saved_and_goes_on_to_the_same_numbers(
    update: int, saved: int, tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    class Terminate(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == update:
                os.kill(os.getpid(), signal.SIGTERM)

    config, handler = tiny(epochs=2, dropout=0.3, hide=0.3), signal.getsignal(signal.SIGTERM)
    whole = train(config, make_strategy(2))
    try:
        with pytest.raises(SystemExit) as ended:
            train(config, make_strategy(2), checkpoint_dir=tmp_path / "run", callbacks=[Terminate()])
        assert ended.value.code == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # a second one does not change the code
    finally:
        signal.signal(signal.SIGTERM, handler)
    newest = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "run" / f"checkpoint-{saved}"
    again = train(config, make_strategy(2), resume=newest)

    assert again.fingerprint == whole.fingerprint
    assert again.test_metrics == whole.test_metrics
    assert again.history.epoch == [0, 1]
    for name, values in whole.history.history.items():
        assert again.history.history[name] == pytest.approx(values, rel=1e-6)  # losses are added in two parts
    assert again.history.timing[1].examples == 80 - max(0, saved - 8) * 10
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_checkpoint_of_other_settings_or_reviews_is_refused(
    tiny: MakeConfig, make_strategy: MakeStrategy, csv_file: Path, tmp_path: Path
):
    config, saved = tiny(epochs=1), tmp_path / "checkpoints" / "checkpoint-8"
    train(config, make_strategy(2), checkpoint_dir=saved.parent)

    other = tmp_path / "other.csv"
    other.write_text(csv_file.read_text().replace("房间很好", "房间不好"))
    changed = {"data": other, "epochs": 2, "per_device_train_batch_size": 6, "hidden": 32}
    old = r"of a run with hidden=16, epochs=1, global_batch_size=10, reviews='\w{16}'"
    new = r"and this run has hidden=32, epochs=2, global_batch_size=12, reviews='\w{16}'; resume with"
    with pytest.raises(CheckpointError, match=f"{old}, {new}"):
        train(replace(config, **changed), make_strategy(2), resume=saved)

    one_replica = replace(config, per_device_train_batch_size=10, per_device_eval_batch_size=7, epochs=2)
    with pytest.raises(CheckpointError, match="of a run with epochs=1, and this run has epochs=2; resume with"):
        train(one_replica, make_strategy(1), resume=saved)
    longer = train(one_replica, make_strategy(1), resume=saved, resume_finished=True)
    assert longer.history.epoch == [0, 1]


@pytest.mark.slow
def test_what_is_no_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is not a checkpoint of a Trainer: it has no trainer_state\.json"):
        check_resume(tmp_path, ResumeCheck(dict), finished=False)


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run(tiny: MakeConfig, make_strategy: MakeStrategy):
    with pytest.raises(NonFiniteLossError, match=r"epoch 1: the loss became nan between step 1 and step 8"):
        train(tiny(learning_rate=1e30, clip_norm=0.0), make_strategy(2))


@pytest.mark.slow
def test_transformers_says_as_much_as_before_and_nothing_is_left_without_places(
    tiny: MakeConfig, make_strategy: MakeStrategy, capfd: pytest.CaptureFixture[str]
):
    level = logging.get_verbosity()
    train(tiny(epochs=1), make_strategy(1))
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == level
    assert logging.is_progress_bar_enabled()
