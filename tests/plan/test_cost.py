"""Step times: operations, bubbles, exchanges, each against its formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep_tools.plan.assumptions import PRECISIONS, Software
from lockstep_tools.plan.cost import Prediction, accumulate_seconds, layer_work, predict
from lockstep_tools.plan.division import Division
from lockstep_tools.plan.hardware import LINKS, Network, device_kind
from lockstep_tools.plan.model_shape import ModelShape
from lockstep_tools.plan.shapes import KNOWN_SHAPES

A100 = device_kind("a100-80gb")
NETWORK = Network(inside=LINKS["nvlink3"], between=LINKS["hdr"], per_host=8)
SOFTWARE = Software(precision=PRECISIONS["mixed"], fused_attention=False, overlap_data=False)
# Ends that weigh nothing: all stages are equal.
EVEN = ModelShape(layers=48, hidden=4096, heads=32, vocabulary=1, sequence=2048)


def predicted(shape: ModelShape, division: Division, software: Software = SOFTWARE) -> Prediction:
    return predict(shape, division, device=A100, network=NETWORK, software=software)


def test_operations_are_those_of_the_papers():
    shape, division = KNOWN_SHAPES["gpt-3"], Division(data=4, microbatches=16)
    rows, layers, s, h, words = division.batch, shape.layers, shape.sequence, shape.hidden, shape.vocabulary
    # Korthikanti et al., equation 7.
    model = 72 * rows * layers * s * h * h * (1 + s / (6 * h) + words / (12 * h * layers))
    assert predicted(shape, division).model_flops == pytest.approx(model, rel=1e-12)


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (8, 64), (16, 16)])
def test_the_bubble_is_that_of_equal_stages(stages: int, batches: int):
    division = Division(pipeline=stages, microbatches=batches)
    theory = (stages - 1) / (batches + stages - 1)
    assert predicted(EVEN, division).bubble == pytest.approx(theory, rel=0.02)
    assert predicted(EVEN, replace(division, schedule="gpipe")).bubble == pytest.approx(theory, rel=0.02)


@pytest.mark.parametrize("chunks", [2, 3, 6])
def test_interleaving_divides_the_bubble(chunks: int):
    division = Division(pipeline=8, microbatches=16, schedule="interleaved", stages_per_worker=chunks)
    waits = 7 / chunks
    assert predicted(EVEN, division).bubble == pytest.approx(waits / (16 + waits), rel=0.03)


def test_zero_bubble_fills_it_with_weight_gradients():
    """ZB-H1 (arXiv 2401.10241): of F + B + W each of the other stages leaves F + B - W. W adds to earlier gradients."""
    division = Division(pipeline=8, microbatches=64)
    whole, filled = predicted(EVEN, division), predicted(EVEN, replace(division, schedule="zero_bubble"))
    adding = accumulate_seconds(6 * EVEN.layer_parameters, division, A100, SOFTWARE)
    weights = 6 * layer_work(EVEN, division, A100, SOFTWARE).weights + adding
    assert whole.bubble_s - filled.bubble_s == pytest.approx(7 * 2 * weights, rel=0.01)
    assert filled.compute_s == whole.compute_s


def test_seconds_add_up_to_the_step():
    found = predicted(KNOWN_SHAPES["gpt-3"], Division(data=2, pipeline=8, tensor=8, microbatches=16))
    parts = (found.compute_s, found.bubble_s, found.tensor_s, found.pipeline_s, found.data_s, found.update_s)
    assert found.step_s == pytest.approx(sum(parts))
    assert all(part > 0 for part in parts)


def test_full_recomputation_costs_a_forward_pass():
    division = Division(tensor=8, microbatch_size=4)
    none, full = (
        predicted(KNOWN_SHAPES["megatron-22b"], replace(division, activation_checkpointing=r)) for r in ("none", "full")
    )
    assert 1.25 < full.compute_s / none.compute_s < 1.4
    assert full.tensor_s == pytest.approx(1.5 * none.tensor_s, rel=0.02)


def test_a_layer_takes_what_korthikanti_et_al_measured():
    """Their table 4, one layer of 22 billion parameters, 4 rows, tensor 8: 7.7 ms forward, 7.2 with the sequence split.

    The measurement has two all-reduces of 101 MB in it.
    """
    shape, division = KNOWN_SHAPES["megatron-22b"], Division(tensor=8, microbatch_size=4)
    exchange = predicted(shape, division).tensor_s / (4 * shape.layers + 2) * 2
    plain = layer_work(shape, division, A100, SOFTWARE).forward + exchange
    along = layer_work(shape, replace(division, sequence_parallel=True), A100, SOFTWARE).forward + exchange

    assert plain == pytest.approx(7.7e-3, rel=0.1)
    assert along == pytest.approx(7.2e-3, rel=0.1)


def test_products_lose_efficiency_where_they_are_narrow():
    whole = layer_work(EVEN, Division(microbatch_size=4), A100, SOFTWARE)
    eighth = layer_work(EVEN, Division(microbatch_size=4, tensor=8), A100, SOFTWARE)
    assert whole.forward / 8 < eighth.forward < whole.forward / 2


def test_fused_attention_computes_its_scores_once_more():
    """FlashAttention (arXiv 2205.14135): two products forward, five backward; no passes over scores.

    Those of later tokens are left out, which are half.
    """
    fused = replace(SOFTWARE, fused_attention=True)
    long = EVEN.with_sequence(16384)
    work, open_ = layer_work(long, Division(), A100, fused), layer_work(long, Division(), A100, SOFTWARE)

    assert work.forward < open_.forward
    products = 2 * long.sequence**2 * long.hidden / (A100.peak("fp16") * A100.matmul)
    assert work.backward - 2 * work.forward == pytest.approx(0.5 * products, rel=0.2)


def test_autocast_and_unfused_programs_move_more_bytes():
    fused, eager = (
        KNOWN_SHAPES["megatron-1.7b"],
        replace(KNOWN_SHAPES["megatron-1.7b"], saved=KNOWN_SHAPES["gpt2"].saved),
    )
    autocast = Software(precision=PRECISIONS["bf16"], fused_attention=False)
    assert layer_work(eager, Division(), A100, SOFTWARE).forward > layer_work(fused, Division(), A100, SOFTWARE).forward
    assert layer_work(fused, Division(), A100, autocast).forward > layer_work(fused, Division(), A100, SOFTWARE).forward


def test_tiny_work_costs_its_launches():
    tiny = ModelShape(layers=2, hidden=16, heads=2, vocabulary=10, sequence=4)
    assert layer_work(tiny, Division(), A100, SOFTWARE).forward == pytest.approx(16 * 6e-6)


def test_overlap_hides_the_gradients_exchange_but_for_its_tail():
    division = Division(data=32, microbatches=4, microbatch_size=4)
    open_, hidden = (predicted(EVEN, division, replace(SOFTWARE, overlap_data=over)) for over in (False, True))
    assert hidden.data_s == pytest.approx(0.1 * open_.data_s)


def test_tensor_ranks_across_hosts_pay_the_network():
    within = predicted(EVEN, Division(tensor=8, microbatch_size=4))
    across = predicted(EVEN, Division(tensor=16, microbatch_size=4))
    assert across.tensor_s > 1.3 * within.tensor_s


def test_split_sends_carry_an_eighth():
    division = Division(pipeline=2, tensor=8, microbatches=8)
    whole, split = (predicted(EVEN, division, replace(SOFTWARE, split_sends=how)) for how in (False, True))
    assert split.pipeline_s < 0.4 * whole.pipeline_s
