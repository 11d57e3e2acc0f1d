"""The contenders' processes: a Trainer trains, and a callback tells the stopwatch of every step."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.utils.data import Sampler

import lockstep as ls
from benchmarks.contenders.lockstep_run import split_cpu
from benchmarks.contenders.plain import trained_parameters
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trainer.work import ReviewsWork, reviews_work
from benchmarks.trial import Trial
from lockstep.recipes.reviews.task import build_collator
from lockstep.recipes.reviews.trainer import ReviewsTrainer


class LapEveryStep(transformers.TrainerCallback):
    """Tells the stopwatch that a step is done.

    Args:
        laps: the stopwatch.
    """

    def __init__(self, laps: Laps) -> None:
        self._laps = laps

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Counts a lap, with the loss that was logged last."""
        losses = [logs["loss"] for logs in state.log_history if "loss" in logs]
        self._laps.lap(losses[-1] if losses else float("nan"))


class OriginalTrainer(transformers.Trainer):
    """transformers' Trainer as it is, on the recipe's rows in the recipe's order.

    Args:
        work: what is trained.
        laps: the stopwatch.
    """

    def __init__(self, work: ReviewsWork, laps: Laps) -> None:
        self._work = work
        super().__init__(
            work.task.model,
            work.arguments,
            data_collator=build_collator(work.task),
            train_dataset=work.task.train,
            processing_class=work.task.tokenizer,
            callbacks=[LapEveryStep(laps)],
        )
        self.remove_callback(transformers.PrinterCallback)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return self._work.order


def train_original(laps: Laps, *, processes: int) -> None:
    """The original in this process. With several, every one of them must call it.

    Args:
        laps: the stopwatch.
        processes: among how many the global batch is divided.
    """
    with reviews_work(shares=processes, steps=laps.total) as work:
        laps.trained = trained_parameters(work.task.model)
        OriginalTrainer(work, laps).train()


def train_alone(trial: Trial, seat: Seat, laps: Laps) -> None:
    """The original, in one process, with all cores."""
    torch.set_num_threads(trial.cores)
    train_original(laps, processes=1)


def train_ours(trial: Trial, seat: Seat, laps: Laps) -> None:
    """Ours, on replicas that share the cores."""
    torch.set_num_threads(trial.cores)
    replicas = trial.contender.shares
    strategy = ls.MirroredStrategy(split_cpu(replicas), seed=0)
    with reviews_work(shares=replicas, steps=laps.total) as work:
        laps.trained = trained_parameters(work.task.model)
        trainer = ReviewsTrainer(
            work.config, work.task, args=work.arguments, strategy=strategy, callbacks=[LapEveryStep(laps)]
        )
        trainer.train()
    strategy.close()
