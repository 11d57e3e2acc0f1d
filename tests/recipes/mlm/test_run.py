from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.recipes.conftest import MakeConfig
from tests.stand_in import stand_in_gpus
from transformers import AutoTokenizer, BertForMaskedLM

from lockstep.config import LogicalDevice
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.callbacks import LambdaCallback
from lockstep_tools.recipes.mlm.train import build_mlm, train_mlm

SplitCpu = Callable[[int], tuple[LogicalDevice, ...]]


@pytest.fixture
def pair(split_cpu: SplitCpu) -> Iterator[MirroredStrategy]:
    """Two replicas on two halves of the CPU."""
    with closing(MirroredStrategy(list(split_cpu(2)), seed=0)) as strategy:
        yield strategy


def test_two_replicas_learn_and_are_tested(tiny: MakeConfig, pair: MirroredStrategy, tmp_path: Path):
    epochs: list[int] = []
    callback = LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))

    result = train_mlm(tiny(epochs=3), pair, callbacks=[callback], log_dir=tmp_path / "logs", verbose=0)

    logs = result.history.history
    assert set(logs) == {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert logs["loss"][2] < logs["loss"][0] < 7
    assert logs["val_loss"][2] < logs["val_loss"][0]
    assert logs["val_accuracy"][2] > 0.02
    assert set(result.test_metrics) == {"loss", "accuracy"}
    assert epochs == [0, 1, 2]
    assert list((tmp_path / "logs" / "train").iterdir())
    assert result.vocabulary == 400


@pytest.mark.slow
def test_the_same_run_twice_gives_the_same_numbers(tiny: MakeConfig, pair: MirroredStrategy, split_cpu: SplitCpu):
    config = tiny(epochs=1)
    first = train_mlm(config, pair, verbose=0)
    with closing(MirroredStrategy(list(pair.devices), seed=0)) as again:
        second = train_mlm(config, again, verbose=0)
    assert first.history.history == second.history.history
    assert first.test_metrics == second.test_metrics


@pytest.mark.slow
def test_training_stops_when_validation_no_longer_improves(tiny: MakeConfig, pair: MirroredStrategy):
    # A rate this small moves no float32 weight, so the second epoch cannot beat the first.
    stopped = train_mlm(tiny(epochs=4, learning_rate=1e-30, patience=1, patience_updates=0), pair, verbose=0)
    patient = train_mlm(tiny(epochs=3, learning_rate=1e-30, patience=0), pair, verbose=0)
    assert len(stopped.history.epoch) == 2
    assert len(patient.history.epoch) == 3


@pytest.mark.slow
def test_the_output_is_a_folder_that_transformers_and_the_recipe_load(
    tiny: MakeConfig, pair: MirroredStrategy, tmp_path: Path
):
    config = tiny(epochs=1)

    result = train_mlm(config, pair, output_dir=tmp_path / "out", verbose=0)
    theirs = BertForMaskedLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    again = build_mlm(tiny(pretrained=str(tmp_path / "out"), layers=2, hidden=128, feed_forward=512, vocabulary=30522))

    assert sum(parameter.numel() for parameter in again.module.parameters()) == result.parameters
    assert torch.equal(
        theirs.bert.embeddings.word_embeddings.weight, again.module.bert.embeddings.word_embeddings.weight
    )
    assert tokenizer("A statement.")["input_ids"] == again.tokenizer("A statement.")["input_ids"]
    assert again.tokenizer.all_special_ids == build_mlm(config).tokenizer.all_special_ids


@pytest.mark.slow
def test_on_a_gpu_steps_are_recorded_and_give_what_they_give_on_a_cpu(
    tiny: MakeConfig, pair: MirroredStrategy, caplog: pytest.LogCaptureFixture
):
    """On a stand-in; a step that waits for the device, or whose shapes hang on what the rows hold, is not recorded."""
    config = tiny(epochs=2, padding="full", dropout=0.0)
    with caplog.at_level("INFO", "lockstep"):
        on_cpu = train_mlm(config, pair, verbose=0)
        with stand_in_gpus((256, 256)) as (devices, driver), closing(MirroredStrategy(devices, seed=0)) as strategy:
            on_gpu = train_mlm(config, strategy, verbose=0)
            replays = sum(graph.replays for graph in driver.graphs)

    assert replays > 0, caplog.text
    for name, values in on_cpu.history.history.items():
        assert on_gpu.history.history[name] == pytest.approx(values, rel=2e-4)
