"""LearningRateScheduler, ReduceLROnPlateau and TerminateOnNaN, with Keras's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.checks import check_number
from lockstep.errors import ConfigError, NonFiniteLossError
from lockstep.train.callbacks.base import Callback, Logs, Mode, Monitor


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of each epoch.

    Args:
        schedule: ``schedule(epoch, learning_rate)`` returns the new rate; epochs count from 0. It is called on every
            worker and must return the same there.
        verbose: 1 to write a line per epoch.

    Example:
        >>> callback = LearningRateScheduler(lambda epoch, rate: rate if epoch < 10 else rate * 0.9)
    """

    def __init__(self, schedule: Callable[[int, float], float], verbose: int = 0) -> None:
        super().__init__()
        if not callable(schedule):
            raise ConfigError(f"LearningRateScheduler(schedule={schedule!r}); give a function (epoch, learning_rate)")
        self.schedule, self.verbose = schedule, verbose

    def on_train_begin(self, logs: Logs) -> None:
        _refuse_scheduler(self)

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        rate = self.schedule(epoch, self.model.learning_rate)
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate < 0:
            raise ConfigError(f"the schedule of LearningRateScheduler returned {rate!r}; return a number of at least 0")
        self.model.learning_rate = float(rate)
        if self.verbose:
            self._say(f"epoch {epoch + 1}: learning rate {rate:g}")


class ReduceLROnPlateau(Callback):
    """Multiplies the learning rate of all parameter groups by ``factor`` when a monitored value stops improving.

    Args:
        monitor: a name of the logs.
        factor: less than 1.
        patience: epochs without improvement before the rate is reduced.
        verbose: 1 to write a line when it is.
        mode: "min", "max" or "auto", as in ``EarlyStopping``.
        min_delta: a smaller change is no improvement.
        cooldown: epochs after a reduction in which nothing is counted.
        min_lr: the rate is not reduced below this.

    Example:
        >>> callback = ReduceLROnPlateau("val_loss", factor=0.5, patience=3)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__()
        check_number("ReduceLROnPlateau(factor)", factor, optional=False)
        if not 0 < factor < 1:
            raise ConfigError(f"ReduceLROnPlateau(factor={factor!r}); give a number between 0 and 1")
        for name, value in (("patience", patience), ("cooldown", cooldown), ("min_lr", min_lr)):
            check_number(f"ReduceLROnPlateau({name})", value, least=0, optional=False)
        self._watch = Monitor(monitor, mode=mode, owner="ReduceLROnPlateau", min_delta=min_delta)
        self.monitor, self.factor, self.patience, self.verbose = monitor, factor, patience, verbose
        self.cooldown, self.min_lr = cooldown, min_lr
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.wait = self.cooldown_counter = 0

    def on_train_begin(self, logs: Logs) -> None:
        _refuse_scheduler(self)
        self._reset()
        self._watch.begin(self.model.metrics, validated=self.params.get("validated"))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self._watch.read(logs, validated=bool(self.params.get("validated")))
        if value is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._watch.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        groups = [] if self.model.optimizer is None else self.model.optimizer.param_groups
        if all(float(group["lr"]) <= self.min_lr for group in groups):
            return
        for group in groups:
            group["lr"] = max(group["lr"] * self.factor, min(self.min_lr, group["lr"]))
        self.cooldown_counter, self.wait = self.cooldown, 0
        if self.verbose:
            self._say(f"epoch {epoch + 1}: learning rate reduced to {self.model.learning_rate:g}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooldown_counter": self.cooldown_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.wait, self.cooldown_counter = state["best"], state["wait"], state["cooldown_counter"]


class TerminateOnNaN(Callback):
    """Ends fit after a loss that is NaN or infinite, instead of letting it raise a NonFiniteLossError.

    The weights are those of the last good update, and the epoch of the bad loss is not in the History.

    Example:
        >>> callback = TerminateOnNaN()
    """

    def ends_fit_after(self, error: NonFiniteLossError) -> bool:
        self._say(f"training ends: {error}")
        return True


def _refuse_scheduler(callback: Callback) -> None:
    if callback.model.scheduler is not None:
        raise ConfigError(
            f"{type(callback).__name__} came with compile(scheduler=...), which sets the learning rate at every "
            "update; leave one of them out"
        )
