"""The table of the layouts as Markdown. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.layouts.measure import WorkerMemory
from benchmarks.layouts.roster import LayoutWork, MeasuredLayout
from lockstep.plan.memory import Memory
from lockstep.report import markdown_table
from lockstep.scaling.machine import Machine

_HEADINGS = (
    "layout", "weights MB", "optimizer MB", "peak MB", "expected MB", "peak of expected", "weights", "gradients",
    "optimizer", "activations", "beside", "ending", "exchange", "update", "buffers", "start MB", "kept MB",
)  # fmt: skip
_MB = 2**20

_LEGEND = """\
## What the columns mean

- weights, optimizer, peak, start: measured in each worker; the table has those of the worker whose peak is the highest.
  Peak is the most that was resident (VmHWM) during the steps, start before the first step, both above what the worker
  had after importing everything, joining the others, and a step of a tiny model. Optimizer is AdamW's state.
- kept: the peak of more steps as they run outside of this measurement. For the others freed memory is given back to the
  system at once, so that they show what is in use. Lockstep keeps it for the next step, which is faster, and the gaps
  between what is in use then count too.
- expected: what `lockstep plan` expects of the fullest worker in float32: weights, optimizer, buffers, and the most of
  four moments. Where a backward pass begins: activations, and beside them gradients of earlier microbatches, the head's
  as it is made, and borrowed weights. Where one ends (ending): activations of the other microbatches, gradients, and
  those of the words as they are made. After the last: gradients, and in exchange their copies that travel, or what is
  borrowed. At the update: gradients, and what the optimizer computes in between.
- buffers: where a pipeline's hidden states and their gradients arrive, for every microbatch.
- What is left between the two: buffers of the connections, blocks that are smaller than what is given back, and code
  that runs for the first time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout, measured and expected.

    Args:
        layout: which.
        workers: every worker's memory.
        expected: of the fullest.
    """

    layout: MeasuredLayout
    workers: tuple[WorkerMemory, ...]
    expected: Memory

    @property
    def fullest(self) -> WorkerMemory:
        """The worker whose peak is the highest."""
        return max(self.workers, key=lambda worker: worker.peak_mb)

    @property
    def ratio(self) -> float:
        """What was measured, in parts of what was expected."""
        return self.fullest.peak_mb / (self.expected.total / _MB)


@dataclass(frozen=True, kw_only=True)
class LayoutsConditions:
    """How a run was made.

    Args:
        date: YYYY-MM-DD.
        machine: where.
        command: what was typed.
        steps: of each layout.
    """

    date: str
    machine: Machine
    command: str
    steps: int


def render_layouts(conditions: LayoutsConditions, work: LayoutWork, rows: Sequence[Row]) -> str:
    """The whole report."""
    step = (
        f"A training step of a GPT-2: {work.layers} layers of width {work.hidden}, {work.vocabulary:,} tokens in its "
        f"vocabulary, {work.rows} lines of {work.tokens} tokens in the global batch, AdamW, float32, "
        f"{conditions.steps} steps."
    )
    parts = [
        _head(conditions),
        step,
        markdown_table(_HEADINGS, [_cells(row) for row in rows]),
        _LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


def _head(conditions: LayoutsConditions) -> str:
    machine = conditions.machine
    facts = (
        f"machine: {machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
    )
    title = f"# Memory of a worker against the layout, {conditions.date}"
    return "\n".join([title, "", *(f"- {fact}" for fact in facts)])


def _cells(row: Row) -> list[str]:
    fullest, expected = row.fullest, row.expected
    return [
        row.layout.name,
        *(f"{value:,.0f}" for value in (fullest.weights_mb, fullest.optimizer_mb, fullest.peak_mb)),
        f"{expected.total / _MB:,.0f}",
        f"{row.ratio:.2f}",
        *(
            f"{value / _MB:,.0f}"
            for value in (
                expected.weights,
                expected.gradients,
                expected.optimizer,
                expected.activations,
                expected.beside_activations,
                expected.backward_end,
                expected.exchange,
                expected.update,
                expected.buffers,
            )
        ),
        f"{fullest.start_mb:,.0f}",
        f"{fullest.kept_mb:,.0f}",
    ]
