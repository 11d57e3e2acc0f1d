"""The report as Markdown: circumstances, a table a workload, targets reached or not. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.bench.figures import Figures
from lockstep.bench.machine import Machine
from lockstep.bench.targets import Target, targets_of
from lockstep.bench.trial import Workload

_HEADINGS = (
    "contender", "step ms", "p10", "p90", "ratio", "CPU ms", "exchange + update", "first step s", "peak MB", "RSS MB",
    "PSS MB", "loss",
)  # fmt: skip


_LEGEND = """\
## What the columns mean

- contenders called a check ran in the first round only and take no part in the targets.
- step ms, p10, p90: of the timed steps of all rounds together.
- ratio: to the best rival, the one whose ratio is 1: the median step over the rival's of the same round, and of these
  the median. Below 1 is faster than the best rival.
- CPU ms: CPU time of a step, of all threads and processes together. With all cores busy it is the step times the cores;
  it counts waiting in a spinning barrier, and hardly feels what else the machine does.
- exchange + update: from the moment when the last replica arrives at `optimizer.step` to the moment when all have left
  it, as part of the step.
- first step: from the start of the processes to the end of the slowest one's first step, imports and model included.
- peak, RSS, PSS: memory of all processes of the contender together, read inside the last step. Peak is the sum of their
  resident peaks (VmHWM) and is what the targets compare: so much the machine must have, even where a process gives some
  back at the end of its step. RSS counts pages that processes share in each of them, PSS shares them out.
- loss: of the last step. Every contender trains the same model on the same batches, so these agree but for dropout and
  the batch statistics of each replica or process.
- All use Adam with `fused=True` and the same model and loss functions."""


@dataclass(frozen=True, kw_only=True)
class WorkloadResult:
    """A workload and what its contenders did.

    Args:
        workload: the work.
        figures: one a contender.
    """

    workload: Workload
    figures: tuple[Figures, ...]

    @property
    def targets(self) -> list[Target]:
        """The targets that it speaks about."""
        return targets_of(self.workload.name, self.figures)


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
    """

    date: str
    machine: Machine
    command: str
    warm_up: int
    steps: int
    rounds: int


def render(conditions: Conditions, results: Sequence[WorkloadResult]) -> str:
    """The whole report."""
    parts = [_head(conditions), *(_section(result) for result in results), _LEGEND]
    return "\n\n".join(parts) + "\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column to the left, others to the right.

    Example:
        >>> print(markdown_table(["who", "ms"], [["ours", "1"]]))
        | who | ms |
        | --- | ---: |
        | ours | 1 |
    """
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def _head(conditions: Conditions) -> str:
    machine = conditions.machine
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    how = f"{conditions.warm_up} steps of warm-up, then {conditions.steps} timed"
    facts = (
        f"machine: {where}; load average before the run {machine.load:.2f}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
        f"{conditions.rounds} rounds, the contenders in turn, each in fresh processes; in each trial {how}",
    )
    return "\n".join([f"# CPU benchmark, {conditions.date}", "", *(f"- {fact}" for fact in facts)])


def _section(result: WorkloadResult) -> str:
    targets = result.targets
    settings = [f"- {row.contender.name}: {row.contender.settings}" for row in result.figures]
    verdicts = [[target.text, *_verdict(target)] for target in targets]
    return "\n".join(
        [
            f"## {result.workload.title}",
            "",
            markdown_table(_HEADINGS, [_row(row) for row in result.figures]),
            *(["", markdown_table(("target", "at most", "measured", "reached"), verdicts)] if targets else []),
            "",
            *settings,
        ]
    )


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
    ]


def _verdict(target: Target) -> tuple[str, str, str]:
    return f"{target.limit:.2f}", f"{target.value:.3f}", "yes" if target.reached else "NO"
