"""What a training by the Trainer comes to, epoch by epoch, as ``fit`` of a ``Model`` would record it.

the Trainer's events -> History, and a progress bar of ``lockstep.train``
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lockstep.errors import NonFiniteLossError
from lockstep.train.callbacks import Callback
from lockstep.train.logs import EpochTiming, History, StepClock

_VALIDATION = "eval_"
_MEASURES = ("loss", "accuracy", "f1")


@dataclass
class TrainerView:
    """The Trainer as a progress bar sees a ``Model``: by its clock."""

    clock: StepClock = field(default_factory=StepClock)


class EpochRecord(TrainerCallback):
    """Records the epochs of a training, and ends it where the loss is no number.

    The loss of an epoch is the mean over its updates; what validation found has names beginning with ``val_``.

    Args:
        rows: of the training part.
        batch_size: rows of an update.
        bar: told of epochs and updates; None for nobody.
    """

    def __init__(self, *, rows: int, batch_size: int, bar: Callback | None) -> None:
        self.history = History()
        self._rows, self._batch_size = rows, batch_size
        self._bar = Callback() if bar is None else bar
        self._view = TrainerView()
        self._losses: list[tuple[int, float]] = []  # how many updates, and the mean loss over them
        self._logged = 0
        self._epoch = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tells the bar how much there is to do."""
        self._logged = state.global_step
        view: Any = self._view
        steps = math.ceil(self._rows / self._batch_size)
        self._bar.set_params({"epochs": math.ceil(args.num_train_epochs), "steps": steps, "verbose": 1})
        self._bar.set_model(view)
        self._bar.on_train_begin({})

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Starts a new clock."""
        self._epoch = int(state.epoch or 0)
        self._losses = []
        self._bar.on_epoch_begin(self._epoch, {})
        self._view.clock = StepClock()
        self._view.clock.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stops the clock for an update, and starts it for the next, whose batch is asked for now."""
        clock = self._view.clock
        clock.stop(rows=min(self._batch_size, self._rows - clock.examples))
        self._bar.on_train_batch_end(clock.steps - 1, self._loss())
        clock.start()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Has the updates since the last log logged too, so that they count to this epoch."""
        control.should_log = control.should_log or state.global_step > self._logged
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Notes the mean loss since the last log.

        Raises:
            NonFiniteLossError: it is no number.
        """
        if logs is None or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"epoch {self._epoch + 1}: the loss became {loss} between step {self._logged + 1} and step"
                f" {state.global_step} of the run; try a smaller --learning-rate"
            )
        self._losses.append((state.global_step - self._logged, loss))
        self._logged = state.global_step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Ends the epoch: its numbers are complete."""
        found = metrics or {}
        logs = {**self._loss(), **{f"val_{name}": found[_VALIDATION + name] for name in _MEASURES}}
        clock = self._view.clock
        self.history.add(self._epoch, logs)
        self.history.timing.append(
            EpochTiming(
                epoch=self._epoch,
                seconds=clock.seconds,
                steps=clock.steps,
                examples=clock.examples,
                median_step_s=clock.median_step_s,
            )
        )
        self._bar.on_epoch_end(self._epoch, logs)

    def _loss(self) -> dict[str, float]:
        """The mean over the updates of this epoch that were logged; nothing before the first."""
        steps = sum(number for number, _ in self._losses)
        return {"loss": sum(number * loss for number, loss in self._losses) / steps} if steps else {}
