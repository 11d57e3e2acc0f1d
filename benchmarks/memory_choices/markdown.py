"""The table of the choices as Markdown. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.markdown import Conditions, head
from benchmarks.memory_choices.measure import Measured
from benchmarks.memory_choices.roster import FULL, Choice, ReviewsWork
from lockstep.report import markdown_table

_HEADINGS = ("choice", "trained", "weights MB", "optimizer MB", "peak MB", "of full", "step ms", "step of full")

_LEGEND = """\
## What the columns mean

- bf16 without LoRA: the forward and backward pass in bfloat16 (`precision="bf16"`), the weights in float32. With LoRA
  the frozen weights are kept in bfloat16 too (`load_in="bf16"`).
- LoRA: r=8 beside query and value, and the head in full. checkpointing: gradient checkpointing of every layer.
- trained: numbers that the optimizer changes. weights: of all parameters, one copy for all replicas of the CPU.
  optimizer: its state, two numbers for each trained one with AdamW.
- peak: the most that was resident during the steps, above what the process had before the model was made: weights,
  gradients, optimizer state, activations and what the operations need in between. of full: in parts of the first row.
- step: the median; in parts of the first row's of the same round, and of these the median."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One choice over all rounds.

    Args:
        name: what it is called.
        reason: why it was not measured; empty if it was.
        samples: one a round.
        peak_ratio: to the full training's.
        step_ratio: to the full training's.
    """

    name: str
    reason: str = ""
    samples: tuple[Measured, ...] = ()
    peak_ratio: float = 0.0
    step_ratio: float = 0.0


def rows_of(
    choices: Sequence[Choice], rounds: Sequence[Mapping[str, Measured]], reasons: Mapping[str, str]
) -> Iterator[Row]:
    """A row for every choice.

    Args:
        choices: in the order of the table.
        rounds: what each choice took, by name.
        reasons: why a choice was not measured; empty if it was.
    """
    for choice in choices:
        if reasons[choice.name]:
            yield Row(name=choice.name, reason=reasons[choice.name])
            continue
        pairs = [(each[choice.name], each[FULL]) for each in rounds]
        yield Row(
            name=choice.name,
            samples=tuple(own for own, _ in pairs),
            peak_ratio=median(own.peak_mb / full.peak_mb for own, full in pairs),
            step_ratio=median(median(own.step_ms) / median(full.step_ms) for own, full in pairs),
        )


def render_choices(conditions: Conditions, work: ReviewsWork, rows: Sequence[Row]) -> str:
    """The whole report."""
    absences = [f"- {row.name}: not run: {row.reason}" for row in rows if row.reason]
    parts = [
        head(conditions, "Memory against each choice"),
        _described(work),
        markdown_table(_HEADINGS, [_cells(row) for row in rows]),
        "\n".join(absences),
        _LEGEND,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(work: ReviewsWork) -> str:
    return (
        f"A training step of the reviews' classifier: {work.layers} layers of width {work.hidden}, {work.vocabulary:,} "
        f"tokens in its vocabulary, {work.rows} reviews of {work.tokens} tokens on {work.replicas} replicas, AdamW."
    )


def _cells(row: Row) -> list[str]:
    if not row.samples:
        return [row.name, "not run", *[""] * (len(_HEADINGS) - 2)]
    first = row.samples[0]
    return [
        row.name,
        f"{first.trained:,}",
        *(f"{value:,.0f}" for value in (first.weights_mb, first.optimizer_mb)),
        f"{median(sample.peak_mb for sample in row.samples):,.0f}",
        f"{row.peak_ratio:.2f}",
        f"{median(median(sample.step_ms) for sample in row.samples):,.0f}",
        f"{row.step_ratio:.2f}",
    ]
