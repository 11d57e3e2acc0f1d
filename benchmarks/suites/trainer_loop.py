"""The contenders' processes of the suite ``trainer``: a Trainer trains, and a callback records every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler

import lockstep as ls
from benchmarks.loops import split_cpu, trained_parameters
from benchmarks.processes import ProcessInfo
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Batch, Trial, Workload
from lockstep.recipes.reviews.batches import LengthGroupedSampler
from lockstep.recipes.reviews.config import ReviewsConfig, reviews
from lockstep.recipes.reviews.task import ReviewsTask, build_collator, build_reviews
from lockstep.recipes.reviews.trainer import ReviewsTrainer

if TYPE_CHECKING:
    from transformers import TrainingArguments


ROWS = 128
"""Reviews in a global batch: the recipe's 64 on each of two replicas."""


@dataclass(frozen=True, kw_only=True)
class ReviewsWork:
    """What one contender's process trains."""

    config: ReviewsConfig  # the recipe's, with this contender's rows per device
    task: ReviewsTask  # model, rows, tokenizer
    arguments: TrainingArguments

    @property
    def order(self) -> LengthGroupedSampler:
        """The rows of an epoch, batch by batch: of every 128, the first half is the first replica's or process's."""
        return _order(self.config, self.task)


@contextmanager
def reviews_work(*, shares: int, steps: int) -> Iterator[ReviewsWork]:
    """Builds model and data for one of ``shares`` devices or processes; removes the Trainer's folder at the end."""
    from lockstep.recipes.reviews.trainer import training_arguments

    config = replace(reviews(), per_device_train_batch_size=ROWS // shares)
    with TemporaryDirectory(prefix="lockstep-bench-") as folder:
        arguments = training_arguments(
            config,
            folder,
            on_cpu=True,
            max_steps=steps,
            logging_first_step=True,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
        )
        yield ReviewsWork(config=config, task=build_reviews(config), arguments=arguments)


def _order(config: ReviewsConfig, task: ReviewsTask) -> LengthGroupedSampler:
    return LengthGroupedSampler(task.train, batch_size=ROWS, window=config.length_window, seed=config.seed)


def _model() -> nn.Module:
    model: nn.Module = build_reviews(reviews()).model
    return model


def _batches(batches: int) -> list[Batch]:
    config = reviews()
    task = build_reviews(config)
    loader = DataLoader(task.train, ROWS, sampler=_order(config, task), collate_fn=build_collator(task))
    inputs = [dict(batch) for batch in islice(loader, batches)]
    return [(batch, batch.pop("labels")) for batch in inputs]


def _loss(outputs: Any, labels: Tensor) -> tuple[Tensor, int]:
    return cross_entropy(outputs.logits, labels, reduction="sum"), len(labels)


REVIEWS = Workload(
    name="reviews",
    title="the recipe `reviews`: a BERT of two layers of width 128 and a vocabulary of 20,000 on Chinese reviews,"
    f" global batch {ROWS}, padded to its longest row, dropout 0.1, AdamW, gradients clipped",
    make_module=_model,
    make_batches=_batches,
    loss=_loss,
    count=ROWS,
    learning_rate=reviews().rate,
)


class TimeEveryStep(transformers.TrainerCallback):
    """Records every step, with the loss that was logged last."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses = [logs["loss"] for logs in state.log_history if "loss" in logs]
        self._timer.record_step(losses[-1] if losses else float("nan"))


class OriginalTrainer(transformers.Trainer):
    """transformers' Trainer as it is, on the recipe's rows in the recipe's order."""

    def __init__(self, work: ReviewsWork, timer: StepTimer) -> None:
        self._work = work
        super().__init__(
            work.task.model,
            work.arguments,
            data_collator=build_collator(work.task),
            train_dataset=work.task.train,
            processing_class=work.task.tokenizer,
            callbacks=[TimeEveryStep(timer)],
        )
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self._work.order


def train_original(timer: StepTimer, *, processes: int) -> None:
    """The original in this process. Every one of the ``processes`` that divide the global batch must call it."""
    with reviews_work(shares=processes, steps=timer.total) as work:
        timer.trained = trained_parameters(work.task.model)
        OriginalTrainer(work, timer).train()


def train_alone(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """The original, in one process, with all cores."""
    torch.set_num_threads(trial.cores)
    train_original(timer, processes=1)


def train_ours(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """Ours, on replicas that share the cores."""
    torch.set_num_threads(trial.cores)
    replicas = trial.contender.shares
    strategy = ls.MirroredStrategy(split_cpu(replicas), seed=0)
    with reviews_work(shares=replicas, steps=timer.total) as work:
        timer.trained = trained_parameters(work.task.model)
        trainer = ReviewsTrainer(
            work.config, work.task, args=work.arguments, strategy=strategy, callbacks=[TimeEveryStep(timer)]
        )
        trainer.train()
    strategy.close()
