"""Suite ``trainer``: our Transformers ``Trainer`` beside the original, on the recipe ``reviews``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import log_progress, run_rounds, trials_of
from benchmarks.processes import SpawnedBody
from benchmarks.programs import Program
from benchmarks.report import Report, Section, columns, report_of
from benchmarks.results import Comparison, Figures, compare_steps, fastest, figures_of, with_role
from benchmarks.suites.trainer_loop import REVIEWS, train_alone, train_ours
from benchmarks.trial import Conditions, Contender, Pace, select_contenders

PACE = Pace(warm_up=5, steps=40, rounds=3)
MAX_STEP_RATIO = 0.9
"""Our step time over that of the better setting of the original."""
_PROCESSES = 2


def contenders(cores: int) -> tuple[Contender, ...]:
    """All contenders, ours first.

    Where each process of torchrun has more than one core, it runs once as torchrun starts it, which is with one thread,
    and once with its share of the ``cores``.
    """
    share = max(1, cores // _PROCESSES)
    alone = Contender(
        name="trainer",
        settings="transformers.Trainer, one process, all cores as intra-op threads",
        launcher=SpawnedBody(body=train_alone),
        shares=1,
    )
    return (
        *(_ours(replicas) for replicas in (1, 2, 4)),
        alone,
        _under_torchrun(None),
        *((_under_torchrun(share),) if share > 1 else ()),
    )


def _ours(replicas: int) -> Contender:
    devices = "the whole CPU, as a user has it without a split" if replicas == 1 else f"CPU split in {replicas}"
    return Contender(
        name=f"lockstep-{replicas}",
        settings=f"lockstep.integrations.transformers.Trainer, MirroredStrategy, {devices}, one process",
        launcher=SpawnedBody(body=train_ours),
        shares=replicas,
        role="ours",
    )


def _under_torchrun(threads: int | None) -> Contender:
    how = "one thread each, as torchrun starts it" if threads is None else f"OMP_NUM_THREADS={threads}"
    return Contender(
        name=f"torchrun-{_PROCESSES}" + ("" if threads is None else " tuned"),
        settings=f"transformers.Trainer under torchrun, {_PROCESSES} processes, DDP over gloo, {how}",
        launcher=Program(
            python=Path(sys.executable),
            arguments=("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_PROCESSES}"),
            script=Path(__file__).with_name("under_torchrun.py"),
            variables={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
            takes_batches=False,
        ),
        shares=_PROCESSES,
        processes=_PROCESSES,
    )


COLUMNS = columns(
    "step ms", "p10", "p90", "ratio", "CPU ms", "first step s", "peak MB", "loss", "parameters"
)  # fmt: skip
_MEANINGS = {
    "a step": "is one of the Trainer's own loop: rows are masked, collated and padded in it, gradients are clipped, "
    "the loss is logged every ten steps. Every contender trains the same model on the same global batches; under "
    "torchrun each process collates and pads its own half. Batches differ in length, so steps do too.",
    "loss": "the one that was logged last, the mean of ten steps. Dropout masks differ, so these do a little. Under "
    "torchrun transformers multiplies it, and the gradients, by the number of processes: it takes this model's loss, a "
    "mean, for a part of a sum.",
}


def section_of(figures: Sequence[Figures]) -> Section:
    """The table, with our best against the best baseline; without one of them nothing is compared."""
    best, baseline = (fastest(with_role(figures, role)) for role in ("ours", "baseline"))
    compared: list[Comparison] = []
    if best is not None and baseline is not None:
        compared = [compare_steps(best, baseline, MAX_STEP_RATIO)]
    title = f"{REVIEWS.title[0].upper()}{REVIEWS.title[1:]}"
    return Section(workload=REVIEWS.name, title=title, columns=COLUMNS, figures=figures, comparisons=compared)


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders in turn."""
    chosen = select_contenders(contenders(conditions.machine.cores), asked.only)
    trials = trials_of(REVIEWS, chosen, conditions)
    samples = run_rounds(trials, rounds=conditions.rounds, progress=log_progress).samples
    sections = [section_of(figures_of(chosen, samples, REVIEWS.name))]
    return report_of("trainer-cpu", conditions, "The Trainer on CPUs", sections, samples, meanings=_MEANINGS)
