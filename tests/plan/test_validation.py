"""Predictions compared with published runs, from one set of constants; the docs show the tables made here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median

import pytest
from tests.plan.published import TABLES, WEAK_SCALING, Published, PublishedTable

from lockstep_tools.plan import Choices
from lockstep_tools.plan.assumptions import PRECISIONS, Constants, Software
from lockstep_tools.plan.cost import Prediction, predict
from lockstep_tools.plan.division import Division
from lockstep_tools.plan.hardware import device_kind
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.search import Setting, search, usual_network

# What those programs could do in 2021: no sharded optimizer, no sequence parallelism, no zero-bubble schedule, and
# every layer's activations computed again.
_MEGATRON_CHOICES = Choices(
    schedules=("gpipe", "1f1b", "interleaved"),
    activation_checkpointing=("full",),
    shard_optimizer=(False,),
    shard_parameters=(False,),
    sequence_parallel=(False,),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published row and its prediction, in the unit of what was published."""

    row: Published
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.row.value - 1


def compare(row: Published) -> Comparison:
    """Predicts a published row."""
    kinds = ("none", "full") if row.selective else (row.division.activation_checkpointing,)
    predictions = [
        predict(
            row.shape,
            replace(row.division, activation_checkpointing=kind),
            device=row.device,
            network=row.network,
            software=row.software,
        )
        for kind in kinds
    ]
    seconds, prediction = mean(each.step_s for each in predictions), predictions[0]
    match row.unit:
        case "seconds":
            predicted = seconds
        case "tokens/s":
            predicted = row.division.batch * row.shape.sequence / seconds / row.division.devices
        case "model TFLOP/s":
            predicted = prediction.model_tflops
        case "hardware TFLOP/s":
            predicted = hardware_tflops(row.shape, prediction)
    return Comparison(row=row, predicted=predicted)


@cache
def compared(table: PublishedTable) -> list[Comparison]:
    return [compare(row) for row in table.rows]


def hardware_tflops(shape: ModelShape, prediction: Prediction) -> float:
    """TFLOP/s per device with full recomputation, as Narayanan et al. count in their equation 3."""
    tokens, layers, h = prediction.division.batch * shape.sequence, shape.layers, shape.hidden
    flops = 96 * tokens * layers * h * h * (1 + shape.sequence / (6 * h) + shape.vocabulary / (16 * layers * h))
    return flops / prediction.step_s / prediction.division.devices / 1e12


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the planner would have chosen where a layout was published.

    Args:
        row: the published row.
        best: what the planner prefers for the same model, devices and batch.
        rank: place of the published degrees among all that fit, from 1.
        behind: how much longer their step is predicted to take than that of the planner's own choice.
    """

    row: Published
    best: Prediction
    rank: int
    behind: float


def choose(row: Published) -> Choice:
    """Plans for a published row's model, devices and global batch, as its authors' program could have been set."""
    division = row.division
    setting = Setting(
        shape=row.shape,
        devices=division.devices,
        device=row.device,
        network=usual_network(row.device, division.devices),
        batch=division.batch,
        software=row.software,
    )
    plan = search(setting, _MEGATRON_CHOICES)
    # All stages of those programs have equally many layers.
    found = [each for each in plan.best_of_each if setting.shape.layers % each.division.pipeline == 0]
    rank = [other.division.degrees for other in found].index(division.degrees)
    return Choice(row=row, best=found[0], rank=rank + 1, behind=found[rank].step_s / found[0].step_s - 1)


def middle_error(comparisons: Sequence[Comparison]) -> float:
    """The median of the errors' sizes."""
    return median(abs(comparison.error) for comparison in comparisons)


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison whose error is largest."""
    return max(comparisons, key=lambda comparison: abs(comparison.error))


# Rows whose error is above 20%: model, device, devices, tokens of a microbatch; with what is likely the cause.
_FAR = {
    # One sequence of 8,192 tokens, on the A100 and on the H100; all other rows of this model are within 10%.
    ("mpt-30b", "a100-80gb", 8, 8192),
    ("mpt-30b", "h100-sxm", 8, 8192),
    # Slower than the same model with longer sequences, in the same table.
    ("mpt-760m", "a100-80gb", 8, 48 * 1024),
    ("mpt-760m", "a100-80gb", 8, 96 * 512),
    # Slower than the same model on half and on twice as many GPUs, in the same table.
    ("mpt-1b", "a100-40gb", 32, 10 * 2048),
    # Two sequences on 64 GPUs of 40 GB; on 128, four sequences run a third faster.
    ("mpt-70b", "a100-40gb", 64, 2 * 2048),
    # Microbatches of four instead of two sequences save 13% in the same table.
    ("100 x 12,288, 64 heads", "a100-80gb", 384, 2 * 2048),
    # 64 instead of 104 heads save 16% in the same table: kernels for so many heads were slow.
    ("82 x 13,312, 104 heads", "a100-80gb", 384, 2 * 2048),
}


def _key(row: Published) -> tuple[str, str, int, int]:
    return row.shape.name, row.device.name, row.division.devices, row.division.microbatch_size * row.shape.sequence


_FIGURES = ("published", "predicted", "error")


def summary_markdown() -> str:
    """The table of tables in planner.md."""
    lines = [
        "| published runs | rows | median error | largest error | within 10% |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for title, comparisons in [
        *((f"{table.title}{' (fitted)' if table.fitted else ''}", compared(table)) for table in TABLES),
        ("all but the fitted", [each for table in TABLES if not table.fitted for each in compared(table)]),
    ]:
        far = worst(comparisons)
        near = sum(abs(each.error) <= 0.1 for each in comparisons) / len(comparisons)
        errors = f"{middle_error(comparisons):.1%} | {far.error:+.1%} ({far.row.shape.name}) | {near:.0%}"
        lines.append(f"| {title} | {len(comparisons)} | {errors} |")
    return "\n".join(lines) + "\n"


def choices_markdown() -> str:
    """What the planner would have chosen for the rows of Megatron-LM's table 1, in planner.md."""
    lines = [
        "| model | GPUs | published layout | predicted best | step saved |",
        "| --- | ---: | --- | --- | ---: |",
    ]
    for row in WEAK_SCALING.rows:
        choice = choose(row)
        best = "the same" if choice.rank == 1 else _degrees(choice.best.division)
        saved = 1 - 1 / (1 + choice.behind)
        lines.append(
            f"| {row.shape.name} | {row.division.devices:,} | {_degrees(row.division)} | {best} | {saved:.0%} |"
        )
    return "\n".join(lines) + "\n"


def rows_markdown() -> str:
    """Every row of every table, in planner-runs.md."""
    parts = []
    columns = "model", "sequence", "GPUs", "layout", "microbatches", "checkpointing", "options", *_FIGURES
    for table in TABLES:
        fitted = " The constants of the H100 were fitted to these rows." if table.fitted else ""
        lines = [
            f"## {table.title}",
            "",
            f"Source: {table.source}. In {table.rows[0].unit}.{fitted}",
            "",
            f"| {' | '.join(columns)} |",
            "| --- | ---: | ---: | --- | ---: | --- | --- | ---: | ---: | ---: |",
        ]
        parts.append("\n".join([*lines, *map(_row, compared(table))]))
    return "\n\n".join(parts) + "\n"


def _row(comparison: Comparison) -> str:
    row, division = comparison.row, comparison.row.division
    stages = f", {division.stages_per_worker} stages" if division.stages_per_worker > 1 else ""
    options = (
        f"{division.schedule}{stages}" if division.pipeline > 1 else "",
        "FSDP" if division.shard_parameters else "",
        row.note,
    )
    digits = 2 if row.value < 200 and row.unit == "seconds" else 0
    cells = (
        row.shape.name,
        f"{row.shape.sequence:,}",
        f"{division.devices:,}",
        _degrees(division),
        f"{division.microbatches} x {division.microbatch_size}",
        "selective" if row.selective else division.activation_checkpointing,
        ", ".join(filter(None, options)),
        f"{row.value:,.{digits}f}",
        f"{comparison.predicted:,.{digits}f}",
        f"{comparison.error:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _degrees(division: Division) -> str:
    return " x ".join(map(str, division.degrees))


DOCS = Path(__file__).parents[2] / "docs" / "concepts"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_published_runs_are_predicted_within_a_fifth_but_for_those_that_are_named(table: PublishedTable):
    comparisons = compared(table)
    far = {_key(each.row) for each in comparisons if abs(each.error) > 0.20}
    assert far == _FAR.intersection(map(_key, table.rows))
    assert middle_error(comparisons) < 0.15


def test_runs_that_nothing_was_fitted_to_are_predicted_within_a_tenth_in_the_median():
    """The promise is 10%; what is reached is held closer, so that a slip in a formula is seen."""
    aside = [each for table in TABLES if not table.fitted for each in compared(table)]
    assert len(aside) > 200
    assert middle_error(aside) < 0.05
    assert sum(abs(each.error) <= 0.10 for each in aside) > 0.85 * len(aside)


def test_weak_scaling_from_2_billion_to_a_trillion_is_predicted():
    comparisons = compared(WEAK_SCALING)
    assert len(comparisons) == 10
    assert middle_error(comparisons) < 0.05
    assert abs(worst(comparisons).error) < 0.10


def test_predictions_do_not_hang_on_one_constant():
    """Every part of the peak that is assumed may be a tenth off, and the median of all stays within 15%."""

    def changed(row: Published, *, matmul: float = 1.0, attention: float = 1.0, **constants: float) -> Published:
        device = replace(row.device, matmul=row.device.matmul * matmul, attention=row.device.attention * attention)
        return replace(row, device=device, software=replace(row.software, constants=Constants(**constants)))

    for change in (
        {"matmul": 0.9},
        {"matmul": 1.1},
        {"attention": 0.9},
        {"attention": 1.1},
        {"memory": 0.72},
        {"link": 0.70},
    ):
        rows = [changed(row, **change) for table in TABLES for row in table.rows]
        assert middle_error([compare(row) for row in rows]) < 0.15


@pytest.mark.parametrize("row", WEAK_SCALING.rows, ids=lambda row: row.shape.name)
def test_the_planners_choice_is_the_published_layout_or_close(row: Published):
    choice = choose(row)
    assert choice.rank <= 6
    assert choice.behind < 0.15
    if row.shape.parameters > 70e9:
        assert choice.behind < 0.05


@pytest.mark.parametrize("batch", [32, 128])
def test_of_tensor_and_pipeline_the_tensor_fills_a_host_first(batch: int):
    """Narayanan et al., figure 13: 162 billion parameters on 64 GPUs run fastest at tensor 8, pipeline 8."""
    shape = ModelShape(name="162b", layers=32, hidden=20480, heads=128, vocabulary=51200, sequence=2048)
    software, a100 = (
        Software(precision=PRECISIONS["mixed"], fused_attention=False, split_sends=True),
        device_kind("a100-80gb"),
    )
    steps = {
        tensor: predict(
            shape,
            Division(pipeline=64 // tensor, tensor=tensor, microbatches=batch, activation_checkpointing="full"),
            device=a100,
            network=usual_network(a100, 64),
            software=software,
        ).step_s
        for tensor in (2, 4, 8, 16, 32)
    }

    assert min(steps, key=lambda tensor: steps[tensor]) == 8


def test_the_docs_show_the_figures_that_the_code_makes():
    planner, runs = (DOCS / "planner.md").read_text(), (DOCS / "planner-runs.md").read_text()
    every = [each for table in TABLES for each in compared(table)]
    aside = [each for table in TABLES if not table.fitted for each in compared(table)]
    largest = abs(worst(every).error)
    for claim in (
        f"{len(every)} published runs, {len(every) - len(aside)} of which",
        f"{len(aside)} were set aside: their median error is {middle_error(aside):.1%}.",
        f"The largest error is {largest:.0%}.",
    ):
        assert claim in " ".join(planner.split())
    for made, text, page in (
        (summary_markdown(), planner, "planner.md"),
        (choices_markdown(), planner, "planner.md"),
        (rows_markdown(), runs, "planner-runs.md"),
    ):
        assert made in text, f"put this into {page}:\n\n{made}"
