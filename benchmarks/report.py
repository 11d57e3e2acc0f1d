"""Writes a run's report: Markdown for people, and beside it JSON with every sample for those who count again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Absence
from benchmarks.results import Efficiency, Figures, Target, targets_of
from benchmarks.trial import Workload
from lockstep.atomic_files import atomic_write
from lockstep.report import markdown_table
from lockstep.scaling.machine import Machine

_HEADINGS = (
    "contender", "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "first step s", "peak MB", "RSS MB",
    "PSS MB", "loss", "parameters",
)  # fmt: skip


_LEGEND = """\
## What the columns mean

- contenders called a check ran in the first round only and take no part in the targets; yardsticks do a part of the
  work, to tell what the hardware gives.
- step ms, p10, p90: of the timed steps of all rounds together.
- ratio: to the best rival, the one whose ratio is 1: the median step over the rival's of the same round, and of these
  the median. Below 1 is faster than the best rival. Rivals are the hand-written loops on torch alone; ours, the peers
  and the yardsticks are held against the best of them.
- CPU ms: CPU time of a step, of all threads and processes together. With all cores busy it is the step times the cores;
  it counts waiting in a spinning barrier, and hardly feels what else the machine does.
- exchange + update: from the moment when the last replica arrives at `optimizer.step` to the moment when all have left
  it, as part of the step.
- first step: from the start of the processes to the end of the slowest one's first step, imports and model included.
- peak, RSS, PSS: memory of all processes of the contender together, read inside the last step. Peak is the sum of their
  resident peaks (VmHWM) and is what the targets compare: so much the machine must have, even where a process gives some
  back at the end of its step. RSS counts pages that processes share in each of them, PSS shares them out.
- loss: of the last step. Every contender trains the same model on the same batches, so these agree but for dropout, the
  batch statistics of each replica or process and, on TensorFlow and JAX, the random weights that they begin with.
- parameters: that the optimizer changes.
- step times: the quotient of the two contenders' median steps of the same round; the median, the lowest and the highest
  over the rounds. The first is the parallel efficiency, the second what the shared memory and caches of this machine
  leave of it for any program, the third how much of that ours has.
- On torch all use Adam with `fused=True` and the same modules and loss functions; the workloads in Keras layers are in
  `benchmarks/peers/keras_models.py`. All in float32."""


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """A workload and what its contenders did.

    Args:
        workload: the work.
        figures: one a contender.
        efficiencies: of ours, where it was measured.
        absences: who was to take part and did not.
    """

    workload: Workload
    figures: tuple[Figures, ...]
    efficiencies: tuple[Efficiency, ...] = ()
    absences: tuple[Absence, ...] = ()

    @property
    def targets(self) -> list[Target]:
        """The targets that it speaks about."""
        return targets_of(self.workload.name, self.figures, self.efficiencies)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a run was made.

    Args:
        date: YYYY-MM-DD.
        machine: where.
        command: what was typed.
        warm_up: steps before the timed ones, in each trial.
        steps: timed steps of each trial.
        rounds: trials of each contender.
        peers: each peer's name and the versions of its packages.
    """

    date: str
    machine: Machine
    command: str
    warm_up: int
    steps: int
    rounds: int
    peers: tuple[tuple[str, str], ...] = ()


def render(conditions: Conditions, results: Sequence[WorkloadResult]) -> str:
    """The whole report."""
    parts = [head(conditions, "CPU benchmark"), *(_section(result) for result in results), _LEGEND]
    return "\n\n".join(parts) + "\n"


def head(conditions: Conditions, title: str) -> str:
    """The title and the circumstances of a run."""
    machine = conditions.machine
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    how = f"{conditions.warm_up} steps of warm-up, then {conditions.steps} timed"
    facts = (
        f"machine: {where}; load average before the run {machine.load:.2f}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        *(f"{name}: {versions}" for name, versions in conditions.peers),
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
        f"{conditions.rounds} rounds, the contenders in turn, each in fresh processes; in each trial {how}",
    )
    return "\n".join([f"# {title}, {conditions.date}", "", *(f"- {fact}" for fact in facts)])


def _section(result: WorkloadResult) -> str:
    rows = [*(_row(row) for row in result.figures), *(_empty_row(absence) for absence in result.absences)]
    blocks = [
        f"## {result.workload.title}",
        markdown_table(_HEADINGS, rows),
        _parameter_warning(result.figures),
        target_table(result.targets),
        _efficiency_table(result.efficiencies),
        "\n".join(
            [*settings_list(result.figures), *(f"- {one.contender}: not run: {one.reason}" for one in result.absences)]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def settings_list(figures: Sequence[Figures]) -> list[str]:
    """A line a contender: what was chosen, and how."""
    return [f"- {row.contender.name}: {row.contender.settings}" for row in figures]


def target_table(targets: Sequence[Target]) -> str:
    """Limits beside what was measured; empty without targets."""
    rows = [[target.text, *_verdict(target)] for target in targets]
    return markdown_table(("target", "limit", "measured", "reached"), rows) if rows else ""


def _efficiency_table(efficiencies: Sequence[Efficiency]) -> str:
    rows = [[one.text, f"{one.value:.3f}", f"{min(one.rounds):.3f}", f"{max(one.rounds):.3f}"] for one in efficiencies]
    return markdown_table(("step times", "median round", "lowest", "highest"), rows) if rows else ""


def _parameter_warning(figures: Sequence[Figures]) -> str:
    """Says who trains another number of parameters than the first contender; empty where all agree."""
    expected = figures[0].trained if figures else 0
    others = [f"{row.contender.name} {row.trained:,}" for row in figures if row.trained != expected]
    if not others:
        return ""
    return f"**Not the same model**: {figures[0].contender.name} trains {expected:,} parameters, {', '.join(others)}."


def _row(row: Figures) -> list[str]:
    memory = row.memory
    share = "" if row.exchange_share is None else f"{row.exchange_share:.1%}"
    return [
        row.contender.name,
        *(f"{value:.1f}" for value in (row.median_ms, row.p10_ms, row.p90_ms)),
        f"{row.ratio:.3f}",
        f"{row.cpu_ms:.0f}",
        share,
        f"{row.first_step_s:.2f}",
        *(f"{value:.0f}" for value in (memory.peak_mb, memory.rss_mb, memory.pss_mb)),
        f"{row.loss:.4f}",
        f"{row.trained:,}",
    ]


def _empty_row(absence: Absence) -> list[str]:
    return [absence.contender, "not run", *[""] * (len(_HEADINGS) - 2)]


def _verdict(target: Target) -> tuple[str, str, str]:
    return f"{target.bound} {target.limit:.2f}", f"{target.value:.3f}", "yes" if target.reached else "NO"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a suite returns.

    Args:
        name: of the files, after the date: ``DATE-NAME.md`` and ``DATE-NAME.json``.
        date: YYYY-MM-DD.
        text: the Markdown.
        record: everything that was measured, for the JSON.
        ok: whether the command succeeds.
    """

    name: str
    date: str
    text: str
    record: Mapping[str, Any]
    ok: bool = True


def write_report(folder: Path, report: Report) -> Path:
    """Writes the Markdown and the JSON, each atomically; a report of the same day and name is replaced.

    Returns:
        The path of the Markdown file.
    """
    base = folder / f"{report.date}-{report.name}"
    record = json.dumps(report.record, indent=1) + "\n"
    atomic_write(base.with_name(f"{base.name}.json"), record)
    return atomic_write(base.with_name(f"{base.name}.md"), report.text)
