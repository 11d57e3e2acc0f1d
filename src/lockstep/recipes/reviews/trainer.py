"""The Trainer of the recipe: Lockstep's Transformers ``Trainer`` with the published arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lockstep.errors import NonFiniteLossError
from lockstep.extras import require
from lockstep.integrations.transformers import Trainer
from lockstep.recipes.reviews.batches import GroupedOrder
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.train import ReviewsTask, build_collator
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks import Callback
from lockstep.train.logs import EpochTiming, History, StepClock


def accuracy_and_f1(prediction: Any) -> dict[str, float]:
    """What a Trainer calls ``compute_metrics``.

    Args:
        prediction: has ``predictions``, the logits [rows, classes], and ``label_ids`` [rows], as numpy arrays.

    Returns:
        accuracy, and f1: of the higher class where there are two, so of the good reviews, and else the mean over all.
    """
    logits, classes = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return scores(logits, classes)


def scores(logits: Tensor, classes: Tensor) -> dict[str, float]:
    """Accuracy and F1 of logits [rows, classes] for the right classes [rows] int64."""
    functional = require("torchmetrics.functional.classification", "text")
    count = logits.shape[1]
    f1 = functional.multiclass_f1_score(logits, classes, num_classes=count, average="none")
    return {
        "accuracy": float((logits.argmax(dim=1) == classes).float().mean()),
        "f1": float(f1[1] if count == 2 else f1.mean()),
    }


BEST = "f1"
"""What the best epoch is the best in, over the validation part."""


class ReviewsTrainer(Trainer):
    """A Trainer whose batches hold reviews of like length.

    Args:
        config: the run.
        task: its parts.
        args: as ``training_arguments`` makes them.
        strategy: the devices.
        callbacks: of transformers.
    """

    def __init__(
        self,
        config: ReviewsConfig,
        task: ReviewsTask,
        *,
        args: TrainingArguments,
        strategy: Strategy,
        callbacks: list[TrainerCallback],
        **named: Any,
    ) -> None:
        self._config = config
        self._rows = task.train
        super().__init__(
            task.model,
            args,
            strategy=strategy,
            data_collator=build_collator(task),
            train_dataset=task.train,
            eval_dataset=task.valid.sorted_by_length()[0],
            processing_class=task.tokenizer,
            compute_metrics=accuracy_and_f1,
            callbacks=callbacks,
            **named,
        )
        self.remove_callback(PrinterCallback)  # transformers' dicts on standard output, in place of its bars

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return GroupedOrder(
            self._rows,
            batch_size=self.args.train_batch_size,
            window=self._config.length_window,
            seed=self._config.seed,
        )


def training_arguments(config: ReviewsConfig, folder: Path | str, *, on_cpu: bool, **others: Any) -> TrainingArguments:
    """The published arguments, but for the rate of random weights.

    Args:
        config: the run.
        folder: gets the checkpoints.
        on_cpu: whether the devices are CPUs.
        others: given to TrainingArguments.
    """
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
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # a loss that is no number must be seen
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": BEST,
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
    return TrainingArguments(**{**settings, **others})


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
