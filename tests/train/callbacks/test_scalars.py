from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.errors import MissingExtraError
from lockstep.replicas.device.memory import MB, DeviceMemory
from lockstep.train.callbacks import MLflow, Trackio, WeightsAndBiases
from lockstep.train.callbacks.loggers import batch_scalars, epoch_scalars
from lockstep.train.logs import EpochTiming
from lockstep.train.model import Model

TIMING = EpochTiming(epoch=3, seconds=2.0, steps=4, examples=100, median_step_s=0.25)


def test_an_epoch_has_every_number_under_its_tag():
    memory = DeviceMemory(name="gpu:1", limit=None, in_use=MB, reserved=2 * MB, peak=3 * MB)

    scalars = epoch_scalars({"loss": 0.5, "val_f1@2": 0.25}, TIMING, 0.1, 1.5, [memory])

    assert scalars == {
        "epoch_loss": 0.5,
        "epoch_val_f1_2": 0.25,
        "epoch_learning_rate": 0.1,
        "epoch_examples_per_s": 50.0,
        "epoch_step_ms": 250.0,
        "epoch_grad_norm": 1.5,
        "memory_mb/gpu_1/in_use": 1.0,
        "memory_mb/gpu_1/reserved": 2.0,
        "memory_mb/gpu_1/peak": 3.0,
    }


def test_a_batch_has_the_numbers_of_a_step():
    scalars = batch_scalars({"loss": 0.5}, 0.002, 0.1, None)
    assert scalars == {"batch_loss": 0.5, "batch_learning_rate": 0.1, "batch_step_ms": 2.0}


def test_no_norm_is_computed_unless_it_is_asked_for(model: Model, batches: Any, monkeypatch: pytest.MonkeyPatch):
    computed: list[Any] = []
    monkeypatch.setattr("lockstep.mirroring.optim.update.gradient_norms", lambda *given: computed.append(given) or {})
    model.fit(batches, verbose=0)
    assert not computed
    assert model.grad_norm is None


def test_measuring_the_norm_changes_no_weight(logged_fit: Callable[..., Any], model: Model, batches: Any):
    measured = logged_fit(epochs=1).history["val_loss"]
    assert measured == model.fit(batches, validation_data=batches, verbose=0).history["val_loss"]


@pytest.mark.parametrize(
    ("module", "make"), [("wandb", WeightsAndBiases), ("mlflow", MLflow), ("trackio", lambda: Trackio("project"))]
)
def test_a_missing_library_is_an_error_that_names_the_extra(
    module: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"'{module}' is not installed; .*torch-lockstep\[loggers\]"):
        make()
