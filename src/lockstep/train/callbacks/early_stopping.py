"""EarlyStopping: ends fit when a monitored number has stopped improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.checks import check_number
from lockstep.train.callbacks.base import Callback, Logs, Mode, Monitor

_SAVED = ("best", "wait", "stopped_epoch", "best_epoch")


class EarlyStopping(Callback):
    """Stops training when ``monitor`` has not improved for ``patience`` epochs. Arguments as in Keras.

    It then writes a line with the epoch, the best epoch and its value, and which weights the model has, unless ``fit``
    is silent.

    Args:
        monitor: a name of the logs; another one is an error before the first epoch.
        min_delta: a smaller change is no improvement.
        patience: epochs without improvement after which training stops.
        verbose: 1 writes the line also in a silent fit, and one when weights are restored after the last epoch.
        mode: "min", "max", or "auto" to choose by the metric.
        baseline: a value to beat; epochs that do not beat it count as no improvement.
        restore_best_weights: load the weights of the best epoch at the end of training; kept in memory, on the CPU.
        start_from_epoch: epochs before this one are ignored.

    ``best`` is the best value so far, ``best_epoch`` its epoch, ``stopped_epoch`` the one after which training stopped.

    Example:
        >>> callback = EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__()
        check_number("EarlyStopping(patience)", patience, least=0, optional=False)
        check_number("EarlyStopping(start_from_epoch)", start_from_epoch, least=0, optional=False)
        check_number("EarlyStopping(baseline)", baseline)
        self._watch = Monitor(monitor, mode=mode, owner="EarlyStopping", min_delta=min_delta)
        self.monitor, self.patience, self.verbose, self.baseline = monitor, patience, verbose, baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self._best_weights: dict[str, Tensor] | None = None

    def on_train_begin(self, logs: Logs) -> None:
        self._reset()
        self._watch.begin(self.model.metrics, validated=self.params.get("validated"))

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch < self.start_from_epoch:
            return
        value = self._watch.read(logs, validated=bool(self.params.get("validated")))
        if value is None:
            return
        self.wait += 1
        if self._watch.is_better(value, self.best):
            self.best, self.best_epoch = value, epoch
            if self.restore_best_weights:
                self._best_weights = self.model.host_state_dict()
            # As in Keras, only a value that also beats the baseline resets the wait.
            if self._watch.is_better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs) -> None:
        weights = self._best_weights if self.restore_best_weights else None
        if self.stopped_epoch and (self.verbose or self.params.get("verbose")):
            self._say(f"epoch {self.stopped_epoch + 1}: early stopping, {self._reason(restored=weights is not None)}")
        elif weights is not None and self.verbose:
            self._say(f"the weights are those of epoch {self.best_epoch + 1}: {self.monitor} {self.best:.6g}")
        if weights is not None:
            self.model.load_state_dict(weights)

    def _reason(self, *, restored: bool) -> str:
        if self.best is None:
            return f"{self.monitor} was never a number"
        which = "restored" if restored else "not restored"
        return f"best {self.monitor} {self.best:.6g} in epoch {self.best_epoch + 1}, whose weights are {which}"

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._best_weights, **{name: getattr(self, name) for name in _SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best_weights = state["weights"]
        for name in _SAVED:
            setattr(self, name, state[name])

    def close(self) -> None:
        self._best_weights = None
