"""Suite ``trainer``: our Transformers ``Trainer`` beside the original, on the recipe ``reviews``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import log_progress, run_rounds, trials_of
from benchmarks.processes import SpawnedBody
from benchmarks.programs import Program
from benchmarks.report import Report, head, settings_list, target_table
from benchmarks.results import Figures, Target, figures_of
from benchmarks.suites.trainer_loop import REVIEWS
from benchmarks.trial import Conditions, Contender, Pace, select_contenders
from lockstep.report import markdown_table

PACE = Pace(warm_up=5, steps=40, rounds=3)

_PROCESSES = 2
_SHARES = (1, 2, 4)


def contenders(cores: int) -> tuple[Contender, ...]:
    """All contenders, ours first.

    Args:
        cores: of the machine. Where each process of torchrun has more than one, it runs once as torchrun starts it,
            which is with one thread, and once told to take its share.
    """
    share = max(1, cores // _PROCESSES)
    return (
        *(_ours(replicas) for replicas in _SHARES),
        _alone(),
        _under_torchrun(None),
        *((_under_torchrun(share),) if share > 1 else ()),
    )


def _ours(replicas: int) -> Contender:
    from benchmarks.suites.trainer_loop import train_ours

    devices = "the whole CPU, as a user has it without a split" if replicas == 1 else f"CPU split in {replicas}"
    return Contender(
        name=f"lockstep-{replicas}",
        settings=f"lockstep.integrations.transformers.Trainer, MirroredStrategy, {devices}, one process",
        launcher=SpawnedBody(body=train_ours),
        shares=replicas,
        role="ours",
    )


def _alone() -> Contender:
    from benchmarks.suites.trainer_loop import train_alone

    return Contender(
        name="trainer",
        settings="transformers.Trainer, one process, all cores as intra-op threads",
        launcher=SpawnedBody(body=train_alone),
        shares=1,
    )


def _under_torchrun(threads: int | None) -> Contender:
    """Threads are those that it is told to use; None leaves it to torchrun, which takes one."""
    told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    how = "one thread each, as torchrun starts it" if threads is None else f"OMP_NUM_THREADS={threads}"
    return Contender(
        name=f"torchrun-{_PROCESSES}" + ("" if threads is None else " told"),
        settings=f"transformers.Trainer under torchrun, {_PROCESSES} processes, DDP over gloo, {how}",
        launcher=Program(
            python=Path(sys.executable),
            words=("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_PROCESSES}"),
            script=Path(__file__).with_name("under_torchrun.py"),
            variables=told,
            takes_batches=False,
        ),
        shares=_PROCESSES,
        processes=_PROCESSES,
    )


_HEADINGS = ("contender", "step ms", "p10", "p90", "ratio", "CPU ms", "first step s", "peak MB", "loss", "parameters")

_LEGEND = """\
## What the columns mean

- A step is one of the Trainer's own loop: rows are masked, collated and padded in it, gradients are clipped, the loss
  is logged every ten steps. Every contender trains the same model on the same global batches; under torchrun each
  process collates and pads its own half.
- step ms, p10, p90: of the timed steps of all rounds together. Batches differ in length, so steps do too, in the same
  way for every contender.
- ratio: to the better setting of the original, the one whose ratio is 1: the median step over that one's of the same
  round, and of these the median.
- CPU ms: CPU time of a step, of all threads and processes together.
- first step: from the start of the processes to the end of the slowest one's first step: imports, tokens and model
  included.
- peak: the sum of all processes' resident peaks (VmHWM).
- loss: the one that was logged last, the mean of ten steps. Dropout masks differ, so these do a little. Under torchrun
  transformers multiplies it, and the gradients, by the number of processes: it takes this model's loss, a mean, for a
  part of a sum."""


def render_trainer(conditions: Conditions, title: str, figures: Sequence[Figures], targets: Sequence[Target]) -> str:
    """The whole report."""
    blocks = [
        head(conditions, "The Trainer on CPUs"),
        f"## {title[0].upper()}{title[1:]}",
        markdown_table(_HEADINGS, [_row(row) for row in figures]),
        target_table(targets),
        "\n".join(settings_list(figures)),
        _LEGEND,
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _row(row: Figures) -> list[str]:
    return [
        row.contender.name,
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.ratio:.3f}",
        f"{row.cpu_ms:.0f}",
        f"{row.first_step_s:.2f}",
        f"{row.memory.peak_mb:.0f}",
        f"{row.loss:.4f}",
        f"{row.trained:,}",
    ]


MAX_STEP_RATIO = 0.9
"""Our step time over that of the better setting of the original."""


def targets_of(figures: Sequence[Figures]) -> list[Target]:
    """Our best against the best rival, round by round; nothing where one of them did not run. Pure."""
    ours = [row for row in figures if row.contender.role == "ours"]
    rivals = [row for row in figures if row.contender.role == "rival"]
    if not ours or not rivals:
        return []
    best, rival = (min(rows, key=lambda row: row.ratio) for rows in (ours, rivals))
    text = f"step time, {best.contender.name} / {rival.contender.name}"
    return [Target(text=text, limit=MAX_STEP_RATIO, value=best.ratio / rival.ratio)]


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures the contenders in turn."""
    chosen = select_contenders(contenders(conditions.machine.cores), asked.only)
    samples = run_rounds(
        trials_of(REVIEWS, chosen, conditions), rounds=conditions.rounds, progress=log_progress
    ).samples
    figures = figures_of(chosen, samples, REVIEWS.name)
    targets = targets_of(figures)
    return Report(
        name=f"trainer-cpu-{conditions.machine.cores}",
        date=conditions.date,
        text=render_trainer(conditions, REVIEWS.title, figures, targets),
        record={
            "conditions": asdict(conditions),
            "targets": [{**asdict(target), "reached": target.reached} for target in targets],
            "samples": [asdict(sample) for sample in samples],
        },
    )
