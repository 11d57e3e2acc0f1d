"""A run on few images: it ends with the best epoch's weights, whose statistics are those of the training images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import MakeStrategy
from tests.recipes.images.conftest import MakeConfig
from torch import nn

from lockstep.train.callbacks import LambdaCallback
from lockstep.train.logs import History
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.statistics import compute_statistics, statistics_lag
from lockstep_tools.recipes.images.train import build_images, train_images
from lockstep_tools.recipes.training import Result, Stopping, compile_task, patience_epochs


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """120 images of noise: dark ones and bright ones."""
    random = np.random.default_rng(0)
    for name, darkest in {"dark": 0, "bright": 150}.items():
        (tmp_path / "shades" / name).mkdir(parents=True)
        for number in range(60):
            pixels = random.integers(darkest, darkest + 100, size=(32, 32, 3), dtype="uint8")
            Image.fromarray(pixels).save(tmp_path / "shades" / name / f"{number}.png")
    return tmp_path / "shades"


@pytest.mark.slow
def test_few_separable_images_are_learnt(shades: Path, make_strategy: MakeStrategy):
    result = train_images(ImagesConfig(data=shades, epochs=6, workers=0), make_strategy(2), verbose=0)
    assert result.test_metrics["accuracy"] > 0.9
    assert max(result.history.history["val_accuracy"]) > 0.9
    assert result.updates == 12
    assert result.few_updates is not None


@pytest.mark.slow
@pytest.mark.parametrize("valid_fraction", [0.0, 0.1])
def test_the_best_epoch_is_kept_whatever_comes_after(
    valid_fraction: float, shades: Path, tiny: MakeConfig, make_strategy: MakeStrategy
):
    """The last epochs have a learning rate that spoils the weights."""
    config = tiny(data=shades, epochs=6, batch_size=32, valid_fraction=valid_fraction, learning_rate=0.01)
    task = build_images(config)
    monitor = "val_loss" if valid_fraction else "loss"

    def spoil(epoch: int, logs: object) -> None:
        for group in spoiled.model.optimizer.param_groups:
            group["lr"] = 0.01 if epoch < 4 else 100.0

    spoiled = LambdaCallback(on_epoch_begin=spoil)
    result = train_images(config, make_strategy(2), callbacks=[spoiled], verbose=0)

    values = result.history.history[monitor]
    assert result.stopping is not None
    assert result.stopping.best_epoch == values.index(min(values)) + 1 <= 4
    assert result.test_metrics["loss"] < 1 < max(result.history.history["loss"])
    assert task.parameters == result.parameters


def test_the_result_says_that_and_why_it_stopped_early(shades: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    config = tiny(data=shades, epochs=9, patience=2, patience_updates=0, learning_rate=1e-30, valid_fraction=0.1)

    result = train_images(config, make_strategy(2), verbose=0)

    assert result.stopping is not None
    assert result.stopping.early
    assert str(result.stopping) == (
        f"epoch {result.stopping.best_epoch} by val_loss, which is tested and saved; stopped early after epoch"
        f" {len(result.history.epoch)}, 2 epochs without a lower val_loss"
    )
    assert "stopped" not in str(replace(result.stopping, early=False))
    assert isinstance(result.stopping, Stopping)
    assert str(replace(result.stopping, patience=1)).endswith(", 1 epoch without a lower val_loss")


@pytest.mark.parametrize(
    ("updates", "epochs", "text"),
    [(22, 1, "22 in 1 epoch are few"), (1, 1, "1 in 1 epoch is few"), (79, 3, "79 in 3 epochs are few"), (80, 3, None)],
)
def test_a_run_of_few_updates_is_told_in_the_right_number(updates: int, epochs: int, text: str | None):
    result = Result(
        source="",
        history=History(epoch=[*range(epochs)]),
        fingerprint="",
        test_metrics={},
        batch_size=8,
        parameters=1,
        updates=updates,
    )
    advice = " to learn from; give more --epochs or smaller batches"
    assert result.few_updates == (None if text is None else text + advice)


@pytest.mark.parametrize(
    ("patience", "updates", "accumulate", "batches", "epochs"),
    [(5, 80, 1, 2, 40), (5, 80, 1, 21, 5), (2, 80, 1, 45, 2), (2, 0, 1, 2, 2), (2, 80, 3, 7, 27), (60, 80, 1, 2, 60)],
)
def test_patience_lasts_a_number_of_updates(
    patience: int, updates: int, accumulate: int, batches: int, epochs: int, tiny: MakeConfig
):
    config = tiny(patience=patience, patience_updates=updates, accumulate=accumulate)
    assert patience_epochs(config, batches) == epochs


@pytest.mark.parametrize(("batches", "momentum", "lag"), [(2, 0.2, True), (21, 0.2, False), (21, 0.1, True)])
def test_statistics_lag_where_an_epoch_is_short(batches: int, momentum: float, lag: bool):
    assert statistics_lag(batches, momentum) is lag


def test_statistics_are_those_of_all_rows():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.01))
    images = torch.randn(9, 3, 5, 5)

    compute_statistics(module, [(images[:4], images), (images[4:8], images), (images[8:], images)])

    values = module[0](images[:8]).detach().movedim(1, 0)
    variances = [part.flatten(1).var(1) for part in values.split(4, dim=1)]
    torch.testing.assert_close(module[1].running_mean, values.flatten(1).mean(1))
    torch.testing.assert_close(module[1].running_var, sum(variances) / 2)
    assert module[1].momentum == 0.01


@pytest.mark.slow
def test_any_number_of_replicas_computes_the_same_statistics(
    shades: Path, tiny: MakeConfig, make_strategy: MakeStrategy
):
    def statistics(replicas: int) -> dict[str, list[float]]:
        task = build_images(tiny(data=shades, batch_size=40, learning_rate=1e-30, sync_batchnorm=True))
        model = compile_task(task, make_strategy(replicas))
        model.fit(task.train, validation_data=task.valid, callbacks=[*task.callbacks], verbose=0)
        return {name: value.tolist() for name, value in model.state_dict().items() if "running" in name}

    one = statistics(1)

    assert len(one) == 104
    for name, values in statistics(2).items():
        assert values == pytest.approx(one[name], rel=1e-6, abs=1e-9)
