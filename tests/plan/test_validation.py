"""Predictions held against published results, from one set of constants; and those results against themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.plan import KNOWN_SHAPES, LINKS, Layout, ModelShape, Network, Prediction, device_kind, predict
from lockstep.plan.published import FIXED_BATCH, RECOMPUTATION, WEAK_SCALING, Published
from lockstep.plan.software import Constants, Software, precision_named
from lockstep.plan.validation import Comparison, choose, compare, middle_error, validation_markdown, worst

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"
A100_FLOPS = 312e12


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


def test_the_gain_of_selective_recomputation_is_predicted():
    """Korthikanti et al. published 29.0%, 31.8%, 29.7% and 32.1% more throughput."""
    found = {(c.row.model, c.row.layout.recompute): c.predicted for c in compared(RECOMPUTATION.rows)}

    for model in ("gpt-3", "megatron-530b", "megatron-1t"):
        assert 1.27 < found[model, "full"] / found[model, "selective"] < 1.40


def test_predictions_do_not_hang_on_one_constant():
    """Every part of the peak that is assumed may be a tenth off, and the promised 15% still holds."""
    for constants in (Constants(matmul=0.72), Constants(matmul=0.88), Constants(memory=0.72), Constants(link=0.70)):
        errors = []
        for row in WEAK_SCALING.rows:
            software = Software(
                precision=precision_named("mixed"),
                fused_attention=False,
                overlap_data=row.overlap_data,
                split_sends=True,
                constants=constants,
            )
            errors.append(abs(_predict(row.model, row.layout, software).hardware_tflops / row.value - 1))
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
    software = Software(precision=precision_named("mixed"), fused_attention=False, split_sends=True)
    steps = {
        tensor: _predict(
            shape,
            Layout(pipeline=64 // tensor, tensor=tensor, microbatches=batch, recompute="full"),
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


@pytest.mark.parametrize(
    ("row", "utilization"), list(zip(RECOMPUTATION.rows[1::2], (0.415, 0.514, 0.560, 0.563), strict=True))
)
def test_published_steps_give_the_published_utilization(row: Published, utilization: float):
    """Korthikanti et al., table 5: model FLOPs over seconds and peak."""
    flops = compare(row).prediction.model_flops

    assert flops / row.value / row.layout.devices / A100_FLOPS == pytest.approx(utilization, abs=0.002)


def test_the_docs_show_the_table_that_the_code_makes():
    made = validation_markdown()

    assert made in DOCS.read_text(), f"put this into {DOCS}:\n\n{made}"


def _predict(model: str | ModelShape, layout: Layout, software: Software) -> Prediction:
    device = device_kind("a100-80gb")
    network = Network(inside=LINKS["nvlink3"], between=LINKS["hdr"], per_host=8)
    shape = KNOWN_SHAPES[model] if isinstance(model, str) else model
    return predict(shape, layout, device=device, network=network, software=software)
