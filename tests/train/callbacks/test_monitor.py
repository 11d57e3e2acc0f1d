from __future__ import annotations

import pytest
from torchmetrics import CatMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.regression import MeanSquaredError

from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Monitor

METRICS = {"accuracy": BinaryAccuracy(), "error": MeanSquaredError(), "all": CatMetric(), "sum": SumMetric()}


def monitor(name: str, mode: str = "auto", min_delta: float = 0.0) -> Monitor:
    made = Monitor(name, mode=mode, owner="EarlyStopping", min_delta=min_delta)  # type: ignore[arg-type]
    made.begin(METRICS, validated=None)
    return made


@pytest.mark.parametrize(
    ("name", "mode", "higher"),
    [
        ("loss", "auto", False),
        ("val_loss", "auto", False),
        ("accuracy", "auto", True),
        ("val_accuracy", "auto", True),
        ("val_error", "auto", False),
        ("val_accuracy", "min", False),
        ("unheard_of", "max", True),
    ],
)
def test_the_direction(name: str, mode: str, higher: bool):
    assert monitor(name, mode).is_better(2.0, 1.0) is higher
    assert monitor(name, mode).is_better(1.0, 2.0) is not higher


def test_a_metric_that_does_not_say_asks_for_a_mode():
    with pytest.raises(ConfigError, match="cannot tell whether 'val_all' is better high or low; give mode="):
        monitor("val_all").is_better(1.0, 2.0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"EarlyStopping\(mode\)='best' is unknown; choose"):
        monitor("loss", "best")


@pytest.mark.parametrize("min_delta", [0.5, -0.5])
def test_a_small_change_is_no_progress(min_delta: float):
    watch = monitor("loss", min_delta=min_delta)
    assert not watch.is_better(1.5, 2.0)
    assert watch.is_better(1.4, 2.0)


def test_equal_is_not_better_and_nan_is_never():
    watch = monitor("loss")
    assert not watch.is_better(1.0, 1.0)
    assert not watch.is_better(float("nan"), None)
    assert watch.is_better(1.0, None)


def test_an_absent_name_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="monitors 'val_loss', which the logs lack; they have: loss, acc"):
        monitor("val_loss").read({"loss": 1.0, "acc": 2.0}, validated=False)
    assert monitor("val_loss").read({"loss": 1.0, "acc": 2.0}, validated=True) is None  # in an epoch without validation


def test_a_present_name_is_read():
    assert monitor("loss").read({"loss": 1.5}, validated=False) == 1.5


@pytest.mark.parametrize(
    ("name", "validated"),
    [("loss", False), ("val_loss", True), ("learning_rate", False), ("val_accuracy", True), ("accuracy_top", False)],
)
def test_a_name_that_the_logs_will_or_may_have_passes_before_the_first_epoch(name: str, validated: bool):
    Monitor(name, mode="min", owner="EarlyStopping").begin(METRICS, validated=validated)


@pytest.mark.parametrize(
    ("name", "validated"), [("val_loss", False), ("val_learning_rate", True), ("acuracy", True), ("val_auc", True)]
)
def test_a_name_that_the_logs_will_lack_is_refused_before_the_first_epoch(name: str, validated: bool):
    watch = Monitor(name, mode="min", owner="EarlyStopping")
    with pytest.raises(ConfigError, match=rf"{name}.*they will have: loss, accuracy, error.*learning_rate"):
        watch.begin(METRICS, validated=validated)
