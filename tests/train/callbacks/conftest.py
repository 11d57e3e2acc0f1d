"""Trainings for the tests of loggers: of a small model on two replicas, and by a hand-written loop on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import train
from tests.train.conftest import compiled, slow_sgd
from torch import Tensor, nn

from lockstep.train.callbacks import Callback
from lockstep.train.logs import History

Batches = list[tuple[Tensor, Tensor]]


class _Interrupt(Callback):
    """Presses Ctrl-C after the first batch of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch, self._here = epoch, False

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self._here = epoch == self._epoch

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        if self._here and batch == 1:
            raise KeyboardInterrupt


@pytest.fixture
def logged_fit(make_strategy: Callable[..., Any], batches: Batches) -> Callable[..., History]:
    """A function that trains a new model with validation, and computes the gradient norm.

    With ``interrupted_in`` it presses Ctrl-C in that epoch, after one batch.
    """
    strategy = make_strategy(2)

    def fit(*callbacks: Callback, epochs: int = 2, interrupted_in: int | None = None) -> History:
        torch.manual_seed(0)
        model = compiled(nn.Linear(3, 1), strategy, clip_norm=math.inf)
        settings: dict[str, Any] = {"validation_data": batches, "epochs": epochs, "verbose": 0}
        if interrupted_in is None:
            return model.fit(batches, callbacks=[*callbacks], **settings)
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches, callbacks=[*callbacks, _Interrupt(interrupted_in)], **settings)
        return model.history

    return fit


@pytest.fixture
def gradient_norms(batches: Batches) -> list[float]:
    """The norms of the gradients of each update of ``logged_fit``, on one device."""
    torch.manual_seed(0)
    return train(nn.Linear(3, 1), batches, slow_sgd, nn.functional.mse_loss, epochs=2).norms


@pytest.fixture
def expected(gradient_norms: list[float]) -> Callable[[History], dict[str, dict[int, float]]]:
    """A function that returns what a logger must have written of a ``logged_fit``: tag -> number by epoch."""

    def scalars(history: History) -> dict[str, dict[int, float]]:
        steps = len(gradient_norms) // 2
        by_epoch = {
            "epoch_loss": history.history["loss"],
            "epoch_val_loss": history.history["val_loss"],
            "epoch_learning_rate": [0.05, 0.05],
            "epoch_examples_per_s": [timing.examples_per_s for timing in history.timing],
            "epoch_step_ms": [1000 * timing.median_step_s for timing in history.timing],
            "epoch_grad_norm": gradient_norms[steps - 1 :: steps],
        }
        return {tag: pytest.approx(dict(enumerate(values)), rel=1e-5) for tag, values in by_epoch.items()}

    return scalars
