"""The Trainer of the recipe ``reviews``, and the callback that records its history. Imports transformers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lockstep import console
from lockstep.errors import NonFiniteLossError
from lockstep.extras import require
from lockstep.integrations.transformers import Trainer
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.callbacks.checkpoints import SAVED_AND_STOPPED, Termination
from lockstep.train.callbacks.loggers import ScalarLogger
from lockstep.train.logs import History, StepClock
from lockstep.train.trained_model import Position
from lockstep_tools.recipes.reviews.batches import LengthGroupedSampler, ReviewRows
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.task import ReviewsTask, build_collator
from lockstep_tools.recipes.training import LOGGED_EVERY, ResumeCheck

_SAVED_AS, _LOSSES, _SETTINGS = "lockstep.History", "lockstep.losses", "lockstep.settings"


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Returns accuracy and F1; F1 is that of the second class if there are two, else the mean over all classes."""
    logits, classes = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    functional = require("torchmetrics.functional.classification", "text")
    num_classes = logits.shape[1]
    f1 = functional.multiclass_f1_score(logits, classes, num_classes=num_classes, average="none")
    return {
        "accuracy": float((logits.argmax(dim=1) == classes).float().mean()),
        "f1": float(f1[1] if num_classes == 2 else f1.mean()),
    }


class ReviewsTrainer(Trainer):
    """A Trainer whose batches hold reviews of similar length."""

    def __init__(
        self,
        config: ReviewsConfig,
        task: ReviewsTask,
        *,
        args: TrainingArguments,
        strategy: Strategy,
        callbacks: list[TrainerCallback],
    ) -> None:
        self._config = config
        super().__init__(
            task.model,
            args,
            strategy=strategy,
            data_collator=build_collator(task),
            train_dataset=task.train,
            eval_dataset=task.valid.sorted_by_length(),
            processing_class=task.tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)  # it prints dicts instead of progress bars

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        rows, config = cast(ReviewRows, self.train_dataset), self._config
        size = self.args.train_batch_size
        return LengthGroupedSampler(rows, batch_size=size, window=config.length_window, seed=config.seed)


def training_arguments(
    config: ReviewsConfig, folder: Path | str, *, on_cpu: bool, **overrides: Any
) -> TrainingArguments:
    """Returns the arguments of the published run, except for the learning rate of random weights."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "per_device_eval_batch_size": config.per_device_eval_batch_size,
        "num_train_epochs": config.epochs,
        "learning_rate": config.rate,
        "warmup_steps": config.warmup,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip_norm,
        "gradient_accumulation_steps": config.accumulate,
        "logging_strategy": "steps",
        "logging_steps": LOGGED_EVERY,
        "logging_nan_inf_filter": False,  # HistoryCallback must see a NaN loss
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "f1",
        "greater_is_better": True,
        "label_names": ["labels"],
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "seed": config.seed,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(**{**settings, **overrides})


class SettingsCallback(TrainerCallback):
    """Saves a run's settings in the Trainer's checkpoints, as ``ResumeCheck`` does in those of a ``Model``."""

    def __init__(self, check: ResumeCheck) -> None:
        self._check = check

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved: Any = state.stateful_callbacks  # by name
        saved[_SETTINGS] = self._check.state_dict()


class SaveAtSigterm(TrainerCallback):
    """On SIGTERM to any worker all save after the update, and exit with 75, as ``BackupAndRestore`` has it.

    At the end of an epoch they do so after its validation. Call ``close`` when the training has ended, however it did.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._workers = strategy.workers
        self._signal = Termination()
        self._ended = self._exits = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._signal.listen(self._workers)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Asks for a checkpoint in the middle of an epoch, and for a log of the losses since the last, for the mean."""
        if self._signal.is_agreed() and not float(state.epoch or 0).is_integer():
            control.should_save = control.should_log = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._signal.is_agreed():
            return
        if self._workers.is_chief:
            path = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
            console.write_line(f"SIGTERM: saved {state.global_step} updates to {path}; start again to go on")
        self._exits = True
        raise SystemExit(SAVED_AND_STOPPED)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._ended = True
        self.close()

    def close(self) -> None:
        """Restores the handler of the signal. One that came too late for the training is sent again."""
        self._signal.restore(again=self._ended, exits=self._exits)


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """The settings of the run that saved a checkpoint; empty for a run of transformers' own Trainer."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    settings: dict[str, Any] = (state.get("stateful_callbacks") or {}).get(_SETTINGS, {})
    return settings


class _TrainerView:
    """What a progress bar and a logger read of a ``Model``, as the Trainer logs it. Steps are updates."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.clock = StepClock()
        self.learning_rate = 0.0
        self.grad_norm: float | None = None
        self.training_state = SimpleNamespace(position=Position())


class HistoryCallback(TrainerCallback):
    """Records the epochs of a training as ``Model.fit`` does, and stops at a loss that is not finite.

    Checkpoints hold the history, so that a resumed training has all epochs. The loss of an epoch is the mean over its
    updates; metrics of the validation have names that begin with ``val_``. ``batch_size`` is the number of rows of an
    update. ``bar`` is a progress bar of ``lockstep.train``, which sees every update, and ``logger`` a logger, which
    sees those whose loss the Trainer logs.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        rows: int,
        batch_size: int,
        bar: Callback | None = None,
        logger: ScalarLogger | None = None,
    ) -> None:
        self.history = History()
        self._rows, self._batch_size = rows, batch_size
        self._bar = Callback() if bar is None else bar
        self._logger = Callback() if logger is None else logger
        self._view: Any = _TrainerView(strategy)
        self._losses: list[tuple[int, float]] = []  # number of updates, and their mean loss
        self._logged = 0
        self._epoch = 0
        self._resumed_at = 0  # updates of this epoch before the training was interrupted

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restores the history from the checkpoint, if there is one; starts the progress bar and the logger."""
        saved: Any = state.stateful_callbacks  # by name
        if _SAVED_AS in saved:
            self.history = History.restored(json.loads(saved[_SAVED_AS]))
        self._logged = state.global_step
        self._view.training_state.position = Position(step=state.global_step)
        steps = math.ceil(self._rows / self._batch_size)
        for callback in (self._bar, self._logger):
            callback.set_params({"epochs": math.ceil(args.num_train_epochs), "steps": steps, "verbose": 1})
            callback.set_model(self._view)
            callback.on_train_begin({})

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        part, self._epoch = math.modf(state.epoch or 0)[0], int(state.epoch or 0)
        saved: Any = state.stateful_callbacks
        self._losses = [(number, loss) for number, loss in saved[_LOSSES]] if part else []
        self._resumed_at = sum(number for number, _ in self._losses)
        for callback in (self._bar, self._logger):
            callback.on_epoch_begin(self._epoch, {})
        self._view.clock = StepClock()
        self._view.clock.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stops the clock of this update and starts that of the next, whose batch is fetched now."""
        clock = self._view.clock
        # The last update of an epoch may have fewer rows.
        clock.stop(rows=min(self._batch_size, self._rows - self._resumed_at * self._batch_size - clock.examples))
        self._bar.on_train_batch_end(self._resumed_at + clock.steps - 1, self._mean_loss())
        clock.start()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Lets the Trainer log the updates since the last log, so that they count to this epoch."""
        # ``logging_steps`` counts over epochs: without this the last updates of one epoch would be in the mean of the
        # next.
        control.should_log = control.should_log or state.global_step > self._logged

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Records the mean loss since the last log; raises NonFiniteLossError if it is NaN or infinite."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"epoch {self._epoch + 1}: the loss became {loss} between step {self._logged + 1} and step"
                f" {state.global_step} of the run; try a smaller --learning-rate"
            )
        self._losses.append((state.global_step - self._logged, loss))
        self._logged = state.global_step
        saved: Any = state.stateful_callbacks
        saved[_LOSSES] = self._losses
        view = self._view
        view.learning_rate, view.grad_norm = logs["learning_rate"], logs.get("grad_norm")
        view.training_state.position = Position(step=state.global_step)
        self._logger.on_train_batch_end(self._resumed_at + view.clock.steps - 1, self._mean_loss())

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        logs = {**self._mean_loss(), **{f"val_{name}": metrics[f"eval_{name}"] for name in ("loss", "accuracy", "f1")}}
        self.history.add(self._epoch, logs)
        self.history.timing.append(self._view.clock.summary(self._epoch))
        saved: Any = state.stateful_callbacks
        saved[_SAVED_AS] = json.dumps(asdict(self.history))  # the Trainer would sort the keys
        for callback in (self._bar, self._logger):
            callback.on_epoch_end(self._epoch, logs)

    def _mean_loss(self) -> dict[str, float]:
        """The mean over the logged updates of this epoch; empty before the first."""
        steps = sum(number for number, _ in self._losses)
        return {"loss": sum(number * loss for number, loss in self._losses) / steps} if steps else {}
