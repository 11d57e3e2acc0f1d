from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import MakeStrategy
from tests.recipes.images.conftest import MakeConfig, MakeTree
from transformers import AutoImageProcessor, MobileNetV2ForImageClassification, pipeline

from lockstep.train.callbacks import LambdaCallback
from lockstep_tools.recipes.images.train import build_images, check_exactness, train_images
from lockstep_tools.recipes.training import compile_task


@pytest.fixture
def colors(make_tree: MakeTree) -> Path:
    """Three classes that differ in their red."""
    return make_tree("data", {"blue": 24, "green": 24, "red": 24})


@pytest.mark.slow
def test_two_replicas_learn_and_are_tested(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path):
    config = tiny(data=colors, epochs=8, learning_rate=0.01, batch_norm_momentum=0.5, patience=0)
    epochs: list[int] = []
    callback = LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))

    result = train_images(config, make_strategy(2), callbacks=[callback], log_dir=tmp_path / "logs", verbose=0)

    logs = result.history.history
    assert set(logs) == {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert logs["loss"][-1] < 0.7 * logs["loss"][0]
    assert logs["accuracy"][-1] > 0.4
    assert set(result.test_metrics) == {"loss", "accuracy"}
    assert epochs == list(range(config.epochs))
    assert result.num_images == {"train": 60, "valid": 6, "test": 6}
    assert result.classes == ("blue", "green", "red")
    assert list((tmp_path / "logs" / "train").iterdir())


@pytest.mark.slow
def test_the_same_run_twice_gives_the_same_numbers(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    config = tiny(data=colors)
    first, second = (train_images(config, strategy, verbose=0) for _ in range(2))
    assert first.history.history == second.history.history
    assert first.test_metrics == second.test_metrics


def test_any_number_of_replicas_and_workers_sees_the_same_pictures(
    colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy
):
    def run(replicas: int, workers: int) -> tuple[dict[str, list[float]], dict[str, float]]:
        config = tiny(data=colors, sync_batchnorm=True, workers=workers, learning_rate=1e-5)
        result = train_images(config, make_strategy(replicas), verbose=0)
        return result.history.history, result.test_metrics

    (one, one_test), (three, three_test) = run(1, 0), run(3, 2)

    assert one["loss"] == pytest.approx(three["loss"], rel=1e-3)
    assert one["val_loss"] == pytest.approx(three["val_loss"], rel=1e-2)
    assert one_test["loss"] == pytest.approx(three_test["loss"], rel=1e-2)


@pytest.mark.slow
def test_training_stops_when_validation_no_longer_improves(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    # A rate this small moves no float32 weight, and a momentum this small no statistics: the second epoch is no better.
    still = {"data": colors, "epochs": 3, "learning_rate": 1e-30, "sync_batchnorm": True, "patience_updates": 0}
    with_validation = train_images(tiny(**still, patience=1, batch_norm_momentum=1e-9), make_strategy(2), verbose=0)
    patient = train_images(tiny(**still, patience=0), make_strategy(2), verbose=0)
    assert len(with_validation.history.epoch) == 2
    assert with_validation.stopping is not None
    assert with_validation.stopping.early
    assert len(patient.history.epoch) == 3


@pytest.mark.slow
def test_without_validation_the_training_loss_is_watched(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    result = train_images(tiny(data=colors, valid_fraction=0.0, patience=1), make_strategy(1), verbose=0)
    assert set(result.history.history) == {"loss", "accuracy", "learning_rate"}


@pytest.mark.slow
def test_tiny_last_shards_pass_batch_norm(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    # 60 pictures in batches of 59: the last one has one row, for one of three replicas.
    result = train_images(tiny(data=colors, batch_size=59), make_strategy(3), verbose=0)
    larger = train_images(tiny(data=colors, batch_size=5000), make_strategy(3), verbose=0)
    assert result.history.timing[0].examples == larger.history.timing[0].examples == 60
    assert result.history.timing[0].steps == 2


@pytest.mark.slow
def test_convolutions_run_with_the_channels_last(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    task = build_images(tiny(data=colors))
    compile_task(task, make_strategy(2))
    weight = task.module.mobilenet_v2.conv_1x1.convolution.weight
    assert task.module.mobilenet_v2.conv_stem.first_conv.convolution.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_the_output_is_what_transformers_loads(
    colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    config = tiny(data=colors)
    result = train_images(config, make_strategy(2), output_dir=tmp_path / "out", verbose=0)

    theirs = MobileNetV2ForImageClassification.from_pretrained(tmp_path / "out").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    task = build_images(config)
    task.module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))

    x, _ = next(iter(task.test))
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, task.module.eval()(x))
    assert theirs.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert sum(p.numel() for p in task.module.parameters()) == result.parameters
    seen = processor((x[0].permute(1, 2, 0).numpy() * 255).round().astype("uint8"), return_tensors="pt")
    torch.testing.assert_close(seen["pixel_values"][0], x[0], atol=1e-5, rtol=0)
    told = pipeline("image-classification", model=str(tmp_path / "out"))(str(colors / "red" / "000.png"))
    assert {answer["label"] for answer in told} == {"blue", "green", "red"}


def test_three_replicas_compute_what_one_device_computes(colors: Path, tiny: MakeConfig, make_strategy: MakeStrategy):
    report = check_exactness(tiny(data=colors), make_strategy(3), steps=2)
    assert report.steps == 2
    assert max(report.sgd.loss, report.adam.loss) < 1e-9
    assert report.sgd.weight < 1e-9
    assert report.sgd.moved > 1e-2
    assert "3 replicas against one device in plain PyTorch, 2 steps, double precision" in str(report)
