"""The report as Markdown. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Figures
from benchmarks.markdown import Conditions, head, settings_list, target_table
from benchmarks.targets import Target
from lockstep.report import markdown_table

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
