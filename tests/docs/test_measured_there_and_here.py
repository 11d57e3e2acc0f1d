"""The tables that show another library's numbers beside ours: those of one device and of Lockstep are computed here.

The other column is what the finding prints that the page names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("KERAS_BACKEND", "torch")  # before any test imports Keras

from lockstep.data.dataset import DistributedDataset

ROOT = Path(__file__).parents[2]
MakeStrategy = Callable[..., Any]
Pair = tuple[object, object]
"""A number of one device, and of Lockstep."""


def pairs_in(page: str, finding: str) -> list[Pair]:
    """The second and the last column of the table after the name of a finding; the first one names the rows."""
    assert (ROOT / "findings" / finding).exists()
    after = (ROOT / "docs" / page).read_text().partition(f"`findings/{finding}`")[2]
    table = re.search(r"(?:^ *\|.*\n)+", after, re.MULTILINE)
    rows = [line.strip("| \n").split(" | ") for line in (table[0] if table else "").splitlines()[2:]]
    return [(row[1], row[-1]) for row in rows]


def compiled(strategy: Any, *layers: Any) -> Any:
    import keras

    from lockstep.integrations.keras import distribute

    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), *layers, weight])
    if strategy is not None:
        distribute(model, strategy, sync_batchnorm=True)
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def fit(model: Any, rows: int, batch_size: int = 8, epochs: int = 1, *callbacks: Any) -> float:
    x = np.arange(1.0, rows + 1, dtype="float32").reshape(-1, 1)
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return float(model.fit(x, 0 * x, callbacks=list(callbacks), **options).history["loss"][-1])


def last_step(strategy: Any, rows: int) -> float:
    """How far the last of two steps moves the weight."""
    import keras

    model, weights = compiled(strategy), []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: weights.append(weight_of(model)))
    fit(model, rows, 8, 1, note)
    return weights[1] - weights[0]


def weight_of(model: Any) -> float:
    return float(model.layers[-1].kernel.numpy().item())


def gamma(strategy: Any) -> float:
    import keras

    norm = keras.layers.BatchNormalization()
    fit(compiled(strategy, norm), 9)
    return float(norm.gamma.numpy().item())


def shard_rows(strategy: Any) -> str:
    if strategy is None:
        return "9"
    (shards,) = strategy.distribute_dataset([torch.ones(9, 1)])
    return ", ".join(str(len(shard)) for shard in strategy.local_results(shards))


def uneven_batches(strategy: Any) -> list[str]:
    alone = {left: last_step(None, 8 + left) for left in (1, 2)}
    parts = [f"{last_step(strategy, 8 + left) / alone[left]:.2f}" for left in (1, 2)]
    losses = [f"{fit(compiled(strategy), 9, size):.4f}" for size in (8, 9)]
    return [shard_rows(strategy), *parts, losses[0], f"{gamma(strategy):.4f}", losses[1]]


@pytest.fixture(scope="module")
def _keras() -> None:
    """Imports Keras, which sets an environment variable, before the test."""
    pytest.importorskip("keras")


@pytest.mark.usefixtures("_keras")
@pytest.mark.parametrize("page", ["coming-from/tf-distribute.md", "zh/tf-distribute.md"])
def test_uneven_batches(make_strategy: MakeStrategy, page: str):
    computed = list(zip(uneven_batches(None), uneven_batches(make_strategy(4)), strict=True))
    assert pairs_in(page, "tf-distribute-keras-uneven-batches.sh") == computed


@pytest.mark.usefixtures("_keras")
def test_a_backup_within_an_epoch(make_strategy: MakeStrategy, tmp_path: Path):
    import keras

    from lockstep.integrations.keras import BackupAndRestore

    whole = compiled(None)
    fit(whole, 8, 2, 2)
    steps: list[int] = []

    def note(batch: int, logs: Any) -> None:
        steps.append(batch)
        if len(steps) == 7:
            raise InterruptedError

    def callbacks() -> list[Any]:
        return [BackupAndRestore(tmp_path, save_freq=2), keras.callbacks.LambdaCallback(on_train_batch_end=note)]

    with pytest.raises(InterruptedError):
        fit(compiled(make_strategy(2)), 8, 2, 2, *callbacks())
    resumed = compiled(make_strategy(2))
    fit(resumed, 8, 2, 2, *callbacks())

    weights = f"{weight_of(whole):.4f}", f"{weight_of(resumed):.4f}"
    assert pairs_in("coming-from/keras.md", "keras-backup-within-epoch.sh") == [("2", str(steps[7])), weights]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = x * self.weight
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def test_the_loss_of_an_evaluation(make_strategy: MakeStrategy, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from lockstep.integrations.transformers import Trainer

    rows: Any = [{"x": torch.tensor([x]), "labels": torch.zeros(1)} for x in (1.0, 1.0, 2.0, 2.0, 10.0)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_eval_batch_size=2,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    losses = []
    for base, strategy in ((transformers.Trainer, None), (Trainer, make_strategy(2))):
        with nullcontext() if strategy is None else strategy.scope():
            losses.append(f"{base(Squares(), arguments, eval_dataset=rows).evaluate()['eval_loss']:.1f}")

    assert pairs_in("coming-from/transformers-trainer.md", "trainer-eval-loss-by-processes.sh") == [tuple(losses)]


def test_a_shuffled_stream_that_is_resumed(split_cpu: Any):
    datasets = pytest.importorskip("datasets")
    source = datasets.IterableDataset.from_generator(lambda: ({"n": number} for number in range(20)))

    def data() -> DistributedDataset:
        stream = source.shuffle(seed=1, buffer_size=6).with_format("torch").batch(4)
        return DistributedDataset(stream, split_cpu(2))

    def numbers(batches: Any) -> list[int]:
        return [int(number) for batch in batches for shard in batch["n"] for number in shard]

    whole, first, again = numbers(data()), data(), data()
    head = numbers(islice(iter(first), 2))
    again.load_state_dict(first.state_dict())
    rows = [*head, *numbers(again)]

    assert rows == whole
    table = [(str(len(set(whole))), str(len(set(rows))))]
    assert pairs_in("how-to/data.md", "datasets-shuffled-stream-resume.sh") == table
