"""Runs the benchmark of the Trainer and writes its table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import Progress, Sample, run_rounds
from benchmarks.processes import SpawnedBody
from benchmarks.programs import Program
from benchmarks.report import Conditions, head, settings_list, target_table
from benchmarks.results import Figures, Target, figures_of
from benchmarks.suites.cpu import picked, trials_of
from benchmarks.suites.trainer_loop import REVIEWS
from benchmarks.trial import Contender
from lockstep.atomic_files import atomic_write
from lockstep.report import markdown_table

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


@dataclass(frozen=True, kw_only=True)
class TrainerResult:
    """What came of it: the figures, and all samples."""

    conditions: Conditions
    figures: tuple[Figures, ...]
    samples: tuple[Sample, ...]

    @property
    def targets(self) -> list[Target]:
        """The target, held against our best."""
        return targets_of(self.figures)

    @property
    def text(self) -> str:
        """The report as Markdown."""
        return render_trainer(self.conditions, REVIEWS.title, self.figures, self.targets)


def targets_of(figures: Sequence[Figures]) -> list[Target]:
    """Our best against the best rival, round by round; nothing where one of them did not run. Pure."""
    ours = [row for row in figures if row.contender.role == "ours"]
    rivals = [row for row in figures if row.contender.role == "rival"]
    if not ours or not rivals:
        return []
    best, rival = (min(rows, key=lambda row: row.ratio) for rows in (ours, rivals))
    text = f"step time, {best.contender.name} / {rival.contender.name}"
    return [Target(text=text, limit=MAX_STEP_RATIO, value=best.ratio / rival.ratio)]


def measure_trainer(conditions: Conditions, progress: Progress, *, only: Sequence[str] | None = None) -> TrainerResult:
    """Measures the contenders in turn.

    Args:
        conditions: how.
        progress: told of each trial's outcome.
        only: names of the contenders that are wanted; None for all.

    Raises:
        ConfigError: a name is nobody's.
        ReplicaError: a contender failed.
    """
    chosen = picked(contenders(conditions.machine.cores), only)
    trials = trials_of(REVIEWS, chosen, conditions)
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=progress)
    return TrainerResult(
        conditions=conditions,
        figures=tuple(figures_of(chosen, rounds.samples, REVIEWS.name)),
        samples=rounds.samples,
    )


def write_trainer_report(folder: Path, result: TrainerResult) -> Path:
    """Writes ``DATE-trainer-cpu-CORES.md`` and ``.json``, each whole or not at all; a run of the same day is replaced.

    Returns:
        The path of the Markdown file.
    """
    record = {
        "conditions": asdict(result.conditions),
        "targets": [{**asdict(target), "reached": target.reached} for target in result.targets],
        "samples": [asdict(sample) for sample in result.samples],
    }
    base = folder / f"{result.conditions.date}-trainer-cpu-{result.conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    return atomic_write(base.with_suffix(".md"), result.text)
