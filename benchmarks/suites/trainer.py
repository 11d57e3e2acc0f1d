"""Suite ``trainer``: our Transformers ``Trainer`` beside the original, on the recipe ``reviews``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import Sampler

import lockstep as ls
from benchmarks.harness import Absence, run_rounds, trials_of
from benchmarks.loops import chief_address, split_cpu, trained_parameters
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Figures, compare_steps, fastest, figures_of, with_role
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Conditions, Contender, Pace, Trial, Workload, select_contenders
from lockstep_tools.recipes.reviews.batches import LengthGroupedSampler
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.task import ReviewsTask, build_collator, build_reviews
from lockstep_tools.recipes.reviews.trainer import ReviewsTrainer, training_arguments

if TYPE_CHECKING:
    from transformers import TrainingArguments

PACE = Pace(warm_up=5, steps=40, rounds=3)
MAX_STEP_RATIO = 0.9
"""Our step time over that of the better setting of the original."""
_PROCESSES = 2


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
        config = self.config
        return LengthGroupedSampler(self.task.train, batch_size=ROWS, window=config.length_window, seed=config.seed)


@contextmanager
def reviews_work(*, replicas: int, steps: int) -> Iterator[ReviewsWork]:
    """Builds model and data for one of ``replicas`` devices or processes; removes the Trainer's folder at the end."""
    config = ReviewsConfig(per_device_train_batch_size=ROWS // replicas)
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


REVIEWS = Workload(
    name="reviews",
    title="The recipe `reviews`: a BERT of two layers of width 128 and a vocabulary of 20,000 on Chinese reviews,"
    f" global batch {ROWS}, padded to its longest row, dropout 0.1, AdamW, gradients clipped",
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


def train_original(trial: Trial, process: ProcessInfo, timer: StepTimer, *, threads: int) -> None:
    """The original, in one process or in several that divide the global batch. All of them must call it.

    Several find each other by torchrun's variables.
    """
    torch.set_num_threads(threads)
    world = trial.contender.processes
    if world > 1:
        host, port = chief_address(trial, process).split(":")
        rank = str(process.rank)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    with reviews_work(replicas=world, steps=timer.total) as work:
        timer.trained = trained_parameters(work.task.model)
        OriginalTrainer(work, timer).train()


def train_ours(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """Ours, on replicas that share the cores."""
    torch.set_num_threads(trial.cores)
    replicas = trial.contender.replicas
    strategy = ls.MirroredStrategy(split_cpu(replicas), seed=0)
    with reviews_work(replicas=replicas, steps=timer.total) as work:
        timer.trained = trained_parameters(work.task.model)
        trainer = ReviewsTrainer(
            work.config, work.task, args=work.arguments, strategy=strategy, callbacks=[TimeEveryStep(timer)]
        )
        trainer.train()
    strategy.close()


def contenders(cores: int) -> tuple[Contender, ...]:
    """All contenders, ours first.

    Where each of the original's processes has more than one core, they run once with torchrun's default of one thread,
    and once with their share of the ``cores``.
    """
    share = max(1, cores // _PROCESSES)
    return (
        *(_ours(replicas) for replicas in (1, 2, 4)),
        _original("trainer", 1, cores, "one process, all cores as intra-op threads"),
        *(
            _original(
                name, _PROCESSES, threads, f"{_PROCESSES} processes, DDP over gloo, intra-op threads of each: {threads}"
            )
            for name, threads in (("trainer ddp-2", 1), ("trainer ddp-2 tuned", share))[: min(share, 2)]
        ),
    )


def _ours(replicas: int) -> Contender:
    devices = "the whole CPU, as a user has it without a split" if replicas == 1 else f"CPU split in {replicas}"
    return Contender(
        name=f"lockstep-{replicas}",
        settings=f"lockstep.integrations.transformers.Trainer, MirroredStrategy, {devices}, one process",
        launcher=SpawnedBody(body=train_ours),
        replicas=replicas,
        role="ours",
    )


def _original(name: str, processes: int, threads: int, settings: str) -> Contender:
    return Contender(
        name=name,
        settings=f"transformers.Trainer, {settings}",
        launcher=SpawnedBody(body=partial(train_original, threads=threads)),
        replicas=processes,
        processes=processes,
    )


COLUMNS = columns("step ms", "p10", "p90", "ratio", "CPU ms", "first step s", "peak MB", "loss", "parameters")
_MEANINGS = {
    "a step": "is one of the Trainer's own loop: rows are masked, collated and padded in it, gradients are clipped, "
    "the loss is logged every ten steps. Every contender trains the same model on the same global batches; each "
    "process of DDP collates and pads its own half. Batches differ in length, so steps do too.",
    "loss": "the one that was logged last, the mean of ten steps. Dropout masks differ, so these do a little. With "
    "several processes transformers multiplies it, and the gradients, by their number: it takes this model's loss, a "
    "mean, for a part of a sum.",
}


def section_of(figures: Sequence[Figures], absences: Sequence[Absence] = ()) -> Section:
    """The table, with our best against the best baseline; without one of them nothing is compared."""
    best, baseline = (fastest(with_role(figures, role)) for role in ("ours", "baseline"))
    both = best is not None and baseline is not None
    return Section(
        workload=REVIEWS.name,
        title=REVIEWS.title,
        columns=COLUMNS,
        figures=figures,
        comparisons=[compare_steps(best, baseline, MAX_STEP_RATIO)] if both else [],
        absences=absences,
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders in turn."""
    chosen = select_contenders(contenders(conditions.machine.cores), asked.only)
    rounds = run_rounds(trials_of(REVIEWS, chosen, conditions), rounds=conditions.rounds)
    section = section_of(figures_of(chosen, rounds.samples, REVIEWS.name), rounds.absences)
    name = f"trainer-cpu-{conditions.machine.cores}"
    return report_of(name, conditions, "The Trainer on CPUs", [section], rounds.samples, meanings=_MEANINGS)
