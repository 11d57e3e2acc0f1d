"""Predictions compared with published results, from one set of constants; planner.md shows the tables made here.

Sources: Narayanan et al. 2021, arXiv 2104.04473 ("PTD"), tables 1 and 2; layouts of table 1 are those of the scripts
by which its authors made it, Megatron-LM's examples/sc21/run_table_1.sh. Korthikanti et al. 2022, arXiv 2205.05198,
tables 3 and 5. All on A100-80GB of Selene (DGX A100: NVLink 3 inside a host, a port of 200 Gb/s InfiniBand for each
device), sequence 2048, vocabulary 51,200, fp16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import pytest

from lockstep.plan import Choices
from lockstep.plan.cost import Prediction, predict
from lockstep.plan.hardware import device_kind
from lockstep.plan.layout import Layout
from lockstep.plan.search import Setting, search, usual_network
from lockstep.plan.shapes import KNOWN_SHAPES, ModelShape
from lockstep.plan.software import PRECISIONS, Constants, Software


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published row.

    Args:
        model: a name in ``KNOWN_SHAPES``.
        layout: how it was trained.
        value: what was published.
        unit: TFLOP/s of a device with recomputation counted, or seconds of a step.
        overlap_data: the wrapper exchanged gradients during the backward pass (PyTorch's; Megatron's own did not).
    """

    model: str
    layout: Layout
    value: float
    unit: Literal["tflops", "seconds"]
    overlap_data: bool = False


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of one paper.

    Args:
        title: what is shown above it.
        rows: its rows.
    """

    title: str
    rows: tuple[Published, ...]


def _layout(
    degrees: tuple[int, int, int],
    batch: int,
    rows: int,
    chunks: int,
) -> Layout:
    data, pipeline, tensor = degrees
    return Layout(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        microbatch_size=rows,
        microbatches=batch // data // rows,
        schedule="interleaved" if chunks > 1 else "1f1b",
        stages_per_worker=chunks,
        activation_checkpointing="full",
    )


# model, (data, pipeline, tensor), global batch, sequences in a microbatch, stages of a worker, TFLOP/s of a GPU
_WEAK_SCALING = (
    ("megatron-1.7b", (32, 1, 1), 512, 16, 1, 137),
    ("megatron-3.6b", (32, 1, 2), 512, 16, 1, 138),
    ("megatron-7.5b", (32, 1, 4), 512, 16, 1, 142),
    ("megatron-18b", (32, 1, 8), 1024, 8, 1, 135),
    ("megatron-39b", (32, 2, 8), 1536, 4, 1, 138),
    ("megatron-76b", (32, 4, 8), 1792, 2, 3, 140),
    ("megatron-145b", (24, 8, 8), 2304, 2, 2, 148),
    ("megatron-310b", (15, 16, 8), 2160, 1, 2, 155),
    ("megatron-530b", (9, 35, 8), 2520, 1, 3, 163),
    ("megatron-1t", (6, 64, 8), 3072, 1, 1, 163),
)
WEAK_SCALING = PublishedTable(
    title="Narayanan et al. 2021, table 1 (TFLOP/s per GPU)",
    rows=tuple(
        Published(
            model=model,
            layout=_layout(degrees, batch, rows, chunks),
            value=tflops,
            unit="tflops",
            # run_table_1.sh: DDP=torch up to 18 billion parameters, DDP=local from 39 billion.
            overlap_data=degrees[1] == 1,
        )
        for model, degrees, batch, rows, chunks, tflops in _WEAK_SCALING
    ),
)

# The paper's table gives the product of tensor and pipeline size; 8 within a host leaves 12 and 35. Whether the
# schedule was interleaved is not said; it is taken as not.
_FIXED_BATCH = (
    ("gpt-3", (4, 12, 8), 1536, 153),
    ("gpt-3", (8, 12, 8), 1536, 149),
    ("gpt-3", (16, 12, 8), 1536, 141),
    ("megatron-530b", (2, 35, 8), 2240, 171),
    ("megatron-530b", (4, 35, 8), 2240, 167),
    ("megatron-530b", (8, 35, 8), 2240, 159),
)
FIXED_BATCH = PublishedTable(
    title="Narayanan et al. 2021, table 2, PTD parallelism (TFLOP/s per GPU)",
    rows=tuple(
        Published(model=model, layout=_layout(degrees, batch, 1, 1), value=tflops, unit="tflops")
        for model, degrees, batch, tflops in _FIXED_BATCH
    ),
)

# model, (data, pipeline, tensor), batch, rows, parts, seconds of a step with full recomputation
_RECOMPUTATION = (
    ("megatron-22b", (1, 1, 8), 4, 4, 1, 1.42),
    ("gpt-3", (1, 8, 8), 64, 1, 3, 18.13),
    ("megatron-530b", (1, 35, 8), 280, 1, 3, 49.05),
    ("megatron-1t", (1, 64, 8), 512, 1, 1, 94.42),
)
RECOMPUTATION = PublishedTable(
    title="Korthikanti et al. 2022, table 5, full recomputation (seconds per step)",
    rows=tuple(
        Published(model=model, layout=_layout(degrees, batch, rows, chunks), value=seconds, unit="seconds")
        for model, degrees, batch, rows, chunks, seconds in _RECOMPUTATION
    ),
)

TABLES = (WEAK_SCALING, FIXED_BATCH, RECOMPUTATION)


_DEVICE = device_kind("a100-80gb")
# Weights and gradients in fp16 and in float32, and Adam's moments: 20 bytes a parameter (Smith et al. 2022, arXiv
# 2201.11990, section 2.1).
_MEGATRON_PRECISION = replace(PRECISIONS["mixed"], optimizer=16)
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
    """A published row and its prediction."""

    row: Published
    prediction: Prediction

    @property
    def predicted(self) -> float:
        """The prediction, in the unit of what was published."""
        if self.row.unit == "seconds":
            return self.prediction.step_s
        return hardware_tflops(KNOWN_SHAPES[self.row.model], self.prediction)

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.row.value - 1


def hardware_tflops(shape: ModelShape, prediction: Prediction) -> float:
    """TFLOP/s per device with full recomputation, as Narayanan et al. count in their equation 3."""
    tokens, layers, h = prediction.layout.batch * shape.sequence, shape.layers, shape.hidden
    flops = 96 * tokens * layers * h * h * (1 + shape.sequence / (6 * h) + shape.vocabulary / (16 * layers * h))
    return flops / prediction.step_s / prediction.layout.devices / 1e12


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


def compare(row: Published) -> Comparison:
    """Predicts a published row."""
    return Comparison(row=row, prediction=_predict(row.model, row.layout, _software(row)))


def choose(row: Published) -> Choice:
    """Plans for a published row's model, devices and global batch, as its authors' program could have been set."""
    layout = row.layout
    setting = Setting(
        shape=KNOWN_SHAPES[row.model],
        devices=layout.devices,
        device=_DEVICE,
        network=usual_network(_DEVICE, layout.devices),
        batch=layout.batch,
        software=_software(row),
    )
    plan = search(setting, _MEGATRON_CHOICES)
    # All stages of those programs have equally many layers.
    found = [each for each in plan.best_of_each if setting.shape.layers % each.layout.pipeline == 0]
    rank = [other.layout.degrees for other in found].index(layout.degrees)
    return Choice(row=row, best=found[0], rank=rank + 1, behind=found[rank].step_s / found[0].step_s - 1)


def middle_error(comparisons: Sequence[Comparison]) -> float:
    """The median of the errors' sizes."""
    return median(abs(comparison.error) for comparison in comparisons)


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison whose error is largest."""
    return max(comparisons, key=lambda comparison: abs(comparison.error))


def validation_markdown() -> str:
    """The tables that planner.md shows: the errors of each published table, and each row of the first one."""
    summary = ["| published | rows | median error | largest error |", "| --- | ---: | ---: | ---: |"]
    for table in TABLES:
        comparisons = [compare(row) for row in table.rows]
        far = worst(comparisons)
        summary.append(
            f"| {table.title} | {len(comparisons)} | {middle_error(comparisons):.1%} | "
            f"{far.error:+.1%} ({far.row.model}) |"
        )
    head = [
        "| model | GPUs | layout | schedule | published | predicted | error | planner's layout | step saved |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    return "\n".join([*summary, "", *head, *map(_row, WEAK_SCALING.rows)]) + "\n"


def _row(row: Published) -> str:
    comparison, choice, layout = compare(row), choose(row), row.layout
    schedule = (
        f"{layout.schedule}, {layout.stages_per_worker} stages" if layout.stages_per_worker > 1 else layout.schedule
    )
    cells = (
        row.model,
        f"{layout.devices:,}",
        _degrees(comparison.prediction),
        schedule if layout.pipeline > 1 else "",
        f"{row.value:.0f}",
        f"{comparison.predicted:.1f}",
        f"{comparison.error:+.1%}",
        "the same" if choice.rank == 1 else _degrees(choice.best),
        f"{1 - 1 / (1 + choice.behind):.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _degrees(prediction: Prediction) -> str:
    return " x ".join(map(str, prediction.layout.degrees))


def _software(row: Published) -> Software:
    return Software(
        precision=_MEGATRON_PRECISION,
        fused_attention=False,
        overlap_data=row.overlap_data,
        split_sends=True,
        static_buffers=False,
    )


DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "planner.md"


def compared(rows: tuple[Published, ...]) -> list[Comparison]:
    return [compare(row) for row in rows]


def test_weak_scaling_from_2_billion_to_a_trillion_is_predicted():
    """The promise is 15% in the median; what is reached is held closer, so that a slip in a formula is seen."""
    comparisons = compared(WEAK_SCALING.rows)

    assert len(comparisons) == 10
    assert middle_error(comparisons) < 0.05
    assert abs(worst(comparisons).error) < 0.10


def test_a_second_and_a_third_table_are_predicted_by_the_same_constants():
    fixed, recomputed = compared(FIXED_BATCH.rows), compared(RECOMPUTATION.rows)

    assert middle_error(fixed) < 0.05
    assert abs(worst(fixed).error) < 0.10
    assert middle_error(recomputed) < 0.10
    assert abs(worst(recomputed).error) < 0.15


def test_predictions_do_not_hang_on_one_constant():
    """Every part of the peak that is assumed may be a tenth off, and the promised 15% still holds."""
    for constants in (Constants(matmul=0.72), Constants(matmul=0.88), Constants(memory=0.72), Constants(link=0.70)):
        errors = []
        for row in WEAK_SCALING.rows:
            software = Software(
                precision=PRECISIONS["mixed"],
                fused_attention=False,
                overlap_data=row.overlap_data,
                split_sends=True,
                constants=constants,
            )
            errors.append(
                abs(hardware_tflops(KNOWN_SHAPES[row.model], _predict(row.model, row.layout, software)) / row.value - 1)
            )
        assert sorted(errors)[5] < 0.15


@pytest.mark.parametrize("row", WEAK_SCALING.rows, ids=lambda row: row.model)
def test_the_planners_choice_is_the_published_layout_or_close(row: Published):
    choice = choose(row)

    assert choice.rank <= 6
    assert choice.behind < 0.15
    if KNOWN_SHAPES[row.model].parameters > 70e9:
        assert choice.behind < 0.05


@pytest.mark.parametrize("batch", [32, 128])
def test_of_tensor_and_pipeline_the_tensor_fills_a_host_first(batch: int):
    """Narayanan et al., figure 13: 162 billion parameters on 64 GPUs run fastest at tensor 8, pipeline 8."""
    shape = ModelShape(name="162b", layers=32, hidden=20480, heads=128, vocabulary=51200, sequence=2048)
    software = Software(precision=PRECISIONS["mixed"], fused_attention=False, split_sends=True)
    steps = {
        tensor: _predict(
            shape,
            Layout(pipeline=64 // tensor, tensor=tensor, microbatches=batch, activation_checkpointing="full"),
            software,
        ).step_s
        for tensor in (2, 4, 8, 16, 32)
    }

    assert min(steps, key=lambda tensor: steps[tensor]) == 8


@pytest.mark.parametrize(
    ("row", "aggregate"),
    list(zip(WEAK_SCALING.rows, (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0), strict=True)),
    ids=lambda value: value.model if isinstance(value, Published) else "",
)
def test_published_rates_add_up_to_the_published_petaflops(row: Published, aggregate: float):
    """Guards the numbers: the paper's own last column is devices times rate."""
    assert row.value * row.layout.devices / 1000 == pytest.approx(aggregate, rel=0.005)


@pytest.mark.parametrize(("row", "days"), list(zip(FIXED_BATCH.rows, (84, 43, 23, 156, 80, 42), strict=True)))
def test_published_rates_give_the_published_days(row: Published, days: int):
    """Narayanan et al., equation 4: 300 billion tokens take 8 T P / (n X)."""
    seconds = 8 * 300e9 * KNOWN_SHAPES[row.model].parameters / (row.layout.devices * row.value * 1e12)

    assert seconds / 86400 == pytest.approx(days, rel=0.03)


def test_the_docs_show_the_table_that_the_code_makes():
    made = validation_markdown()

    assert made in DOCS.read_text(), f"put this into {DOCS}:\n\n{made}"


def _predict(model: str | ModelShape, layout: Layout, software: Software) -> Prediction:
    shape = KNOWN_SHAPES[model] if isinstance(model, str) else model
    network = usual_network(_DEVICE, layout.devices)
    return predict(shape, layout, device=_DEVICE, network=network, software=software)
