"""Predictions beside published results: the error of every row, and where the planner ranks the published layout.

One set of constants (``Constants()``) serves all rows. What differs between rows is what their authors' programs did
(``Published``), and that is taken from their papers and scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lockstep.plan.cost import Prediction, predict
from lockstep.plan.hardware import device_kind
from lockstep.plan.published import TABLES, WEAK_SCALING, Published
from lockstep.plan.search import Choices, Plan, Setting, search, usual_network
from lockstep.plan.shapes import known_shape
from lockstep.plan.software import Software, precision_named

_DEVICE = device_kind("a100-80gb")
# Weights and gradients in fp16 and in float32, and Adam's moments: 20 bytes a parameter (Smith et al. 2022, arXiv
# 2201.11990, section 2.1).
_MEGATRON_PRECISION = replace(precision_named("mixed"), optimizer=16)
# What those programs could do in 2021: no sharded optimizer, no sequence parallelism, no zero-bubble schedule, and
# every layer's activations computed again.
_MEGATRON_CHOICES = Choices(
    schedules=("gpipe", "1f1b", "interleaved"),
    recomputes=("full",),
    shard_optimizer=(False,),
    shard_parameters=(False,),
    sequence_parallel=(False,),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published row and its prediction."""

    row: Published
    prediction: Prediction

    @property
    def predicted(self) -> float:
        """The prediction, in the unit of what was published."""
        return self.prediction.hardware_tflops if self.row.unit == "tflops" else self.prediction.step_s

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.row.value - 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the planner would have chosen where a layout was published.

    Args:
        row: the published row.
        plan: what the planner found for the same model, devices and batch.
        rank: place of the published degrees among all that fit, from 1.
        behind: how much longer their step is predicted to take than that of the planner's own choice.
    """

    row: Published
    plan: Plan
    rank: int
    behind: float


def compare(row: Published) -> Comparison:
    """Predicts a published row."""
    return Comparison(row=row, prediction=_predict(row))


def choose(row: Published) -> Choice:
    """Plans for a published row's model, devices and global batch, as its authors' program could have been set."""
    layout = row.layout
    setting = Setting(
        shape=known_shape(row.model),
        devices=layout.devices,
        device=_DEVICE,
        network=usual_network(_DEVICE, layout.devices),
        batch=layout.batch,
        software=_software(row),
    )
    plan = search(setting, _MEGATRON_CHOICES)
    degrees = (layout.data, layout.pipeline, layout.tensor)
    found = plan.best_of_each
    rank = next(
        place
        for place, other in enumerate(found)
        if (other.layout.data, other.layout.pipeline, other.layout.tensor) == degrees
    )
    return Choice(row=row, plan=plan, rank=rank + 1, behind=found[rank].step_s / plan.best.step_s - 1)


def middle_error(comparisons: Sequence[Comparison]) -> float:
    """The median of the errors' sizes."""
    return median(abs(comparison.error) for comparison in comparisons)


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison whose error is largest."""
    return max(comparisons, key=lambda comparison: abs(comparison.error))


def validation_markdown() -> str:
    """Every table with its errors, and the planner's own choices, as docs/plan.md shows them."""
    parts = []
    for table in TABLES:
        comparisons = [compare(row) for row in table.rows]
        head = [
            "| model | GPUs | data x pipeline x tensor | schedule | recomputed | published | predicted | error |",
            "| --- | ---: | --- | --- | --- | ---: | ---: | ---: |",
        ]
        far = worst(comparisons)
        end = f"Median {middle_error(comparisons):.1%}, worst {far.error:+.1%} ({far.row.model})."
        parts.append("\n".join([f"**{table.title}**", "", *head, *map(_row, comparisons), "", end]))
    head = [
        "| model | published | predicted step | planner's choice | predicted step | published one's rank | behind |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    choices = [_choice_row(choose(row)) for row in WEAK_SCALING.rows]
    parts.append("\n".join(["**The planner's choice beside the published layouts**", "", *head, *choices]))
    return "\n\n".join(parts) + "\n"


def _row(comparison: Comparison) -> str:
    layout, digits = comparison.row.layout, 0 if comparison.row.unit == "tflops" else 2
    schedule = f"{layout.schedule}, {layout.chunks} parts" if layout.chunks > 1 else layout.schedule
    cells = (
        comparison.row.model,
        f"{layout.devices:,}",
        _degrees(comparison.prediction),
        schedule if layout.pipeline > 1 else "",
        layout.recompute,
        f"{comparison.row.value:.{digits}f}",
        f"{comparison.predicted:.{max(1, digits)}f}",
        f"{comparison.error:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _choice_row(choice: Choice) -> str:
    layout, found = choice.row.layout, choice.plan.best_of_each
    cells = (
        choice.row.model,
        f"{layout.data} x {layout.pipeline} x {layout.tensor}",
        f"{found[choice.rank - 1].step_s:.1f} s",
        _degrees(choice.plan.best),
        f"{choice.plan.best.step_s:.1f} s",
        f"{choice.rank} of {len(found)}",
        f"{choice.behind:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _degrees(prediction: Prediction) -> str:
    layout = prediction.layout
    return f"{layout.data} x {layout.pipeline} x {layout.tensor}"


def _software(row: Published) -> Software:
    return Software(
        precision=_MEGATRON_PRECISION,
        fused_attention=False,
        overlap_data=row.overlap_data,
        overlap_tensor=row.overlap_tensor,
        split_sends=True,
        balanced_stages=False,
        keeps_gathered=False,
        lasting_buffers=False,
    )


def _predict(row: Published) -> Prediction:
    network = usual_network(_DEVICE, row.layout.devices)
    return predict(known_shape(row.model), row.layout, device=_DEVICE, network=network, software=_software(row))
