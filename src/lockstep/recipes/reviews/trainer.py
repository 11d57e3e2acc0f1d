"""The Trainer of the recipe: Lockstep's Transformers ``Trainer`` with the published arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from lockstep.integrations.transformers import Trainer
from lockstep.recipes.reviews.build import ReviewsTask, build_collator
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.metrics import accuracy_and_f1
from lockstep.recipes.reviews.order import GroupedOrder
from lockstep.strategies.base import Strategy

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
