"""MaxTime: ends fit after a time by the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lockstep.checks import ABOVE_ZERO, check_number
from lockstep.train.callbacks.base import Callback, Logs


class MaxTime(Callback):
    """Ends fit after a time by the clock, which validation and callbacks count in.

    It writes a line with the epoch of this fit and the step, which counts over all trainings of the model as the steps
    of checkpoints and loggers do.

    The chief's clock decides. One worker ends after the batch in which the time was over. Several workers end after the
    next batch, all after the same one. The epoch ends there: it is validated and its callbacks are called.

    The time is that of the whole training: one that BackupAndRestore resumes has what was left. When the time is over,
    fit has ended and BackupAndRestore removes its backups; to train on with a longer time later, give it
    ``delete_checkpoint=False``.

    Args:
        max_time: seconds, or a ``datetime.timedelta``.

    Attributes:
        elapsed_s: the seconds so far, those before an interruption included.

    Example:
        >>> from datetime import timedelta
        >>> callback = MaxTime(timedelta(hours=11, minutes=30))
    """

    def __init__(self, max_time: float | timedelta) -> None:
        super().__init__()
        seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else max_time
        check_number("MaxTime(max_time)", seconds, least=ABOVE_ZERO, optional=False)
        self.max_time_s = float(seconds)
        # monotonic, as the time of day may be set while a training runs.
        self._began, self._before_s = time.monotonic(), 0.0
        self._ended = False

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._began

    def wants_batch_logs(self) -> bool:
        return False

    def on_train_begin(self, logs: Logs) -> None:
        self._began, self._before_s, self._ended = time.monotonic(), 0.0, False

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._end_if_due()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._end_if_due()

    def on_train_end(self, logs: Logs) -> None:
        if self._ended and self.params.get("verbose"):
            position = self.model.training_state.position
            self._say(
                f"MaxTime: training ends after {self.elapsed_s:.0f} s of {self.max_time_s:.0f} s, "
                f"in epoch {position.epoch}, step {position.step} of all trainings"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed_s": self.elapsed_s, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before_s = state["elapsed_s"]
        self._ended = state["ended"] and self._before_s >= self.max_time_s
        if state["ended"] and not self._ended:
            self.model.stop_training = False  # it was this callback that ended the training

    def _end_if_due(self) -> None:
        if self.model.strategy.workers.is_chief and self.elapsed_s >= self.max_time_s:
            self._ended = self.model.stop_training = True
