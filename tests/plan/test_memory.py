"""Memory against the formulas and figures of the papers that it is taken from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.plan import KNOWN_SHAPES, Layout, Software, estimate_memory
from lockstep.plan.memory import in_flight, layer_activations
from lockstep.plan.settings import precision_named

GPT3 = KNOWN_SHAPES["gpt-3"]
MEGATRON = Software(precision=precision_named("mixed"), fused_attention=False)
SBH = 2048 * 12288
SCORES = 5 * 96 * 2048 / 12288  # 5 a s / h


def test_a_layer_keeps_what_korthikanti_et_al_count():
    """Their table 2, for 16-bit activations: s b h (10 + 24/t + 5 a s/(h t)) and its variants."""
    one = layer_activations(GPT3, Layout(), MEGATRON)
    eight = layer_activations(GPT3, Layout(tensor=8), MEGATRON)
    along = layer_activations(GPT3, Layout(tensor=8, sequence_parallel=True), MEGATRON)

    assert one.all == pytest.approx(SBH * (34 + SCORES))
    assert eight.all == pytest.approx(SBH * (10 + 24 / 8 + SCORES / 8))
    assert along.all == pytest.approx(SBH * (34 + SCORES) / 8)
    assert along.replicated + along.split == pytest.approx(SBH * 34 / 8)
    assert one.input == pytest.approx(2 * SBH)


def test_fused_attention_keeps_no_scores():
    fused = replace(MEGATRON, fused_attention=True)

    assert layer_activations(GPT3, Layout(tensor=8), fused).all == pytest.approx(SBH * (10 + 24 / 8))


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "held"),
    [
        ("gpipe", 1, 40, 40),
        ("1f1b", 1, 40, 8),
        ("1f1b", 1, 3, 3),
        ("zero_bubble", 1, 40, 8),
        ("interleaved", 3, 40, 8 * (1 + 7 / 24)),  # L (1 + (p - 1)/(p m)) layers
    ],
)
def test_microbatches_in_flight_follow_the_schedule(schedule, chunks: int, microbatches: int, held: float):
    layout = Layout(pipeline=8, microbatches=microbatches, schedule=schedule, chunks=chunks)

    assert in_flight(layout) == pytest.approx(held)


def test_state_is_that_of_the_zero_paper():
    """Its figure 1: 7.5 billion parameters, 64 devices: 120 GB, and 31.4 GB with the optimizer's state divided."""
    shape = replace(KNOWN_SHAPES["megatron-7.5b"], vocabulary=1, embedding_rows=0)
    whole = estimate_memory(shape, Layout(data=64), MEGATRON)
    divided = estimate_memory(shape, Layout(data=64, shard_optimizer=True), MEGATRON)

    def state(memory):
        return (memory.weights + memory.gradients + memory.optimizer) / shape.parameters

    assert state(whole) * 7.5 == pytest.approx(120)
    assert state(divided) * 7.5 == pytest.approx(31.4, abs=0.05)


def test_recomputation_keeps_inputs_and_one_layer_at_work():
    layout = Layout(pipeline=8, tensor=8, microbatches=64)
    full = estimate_memory(GPT3, replace(layout, recompute="full"), MEGATRON).activations
    selective = estimate_memory(GPT3, replace(layout, recompute="selective"), MEGATRON).activations
    layer = layer_activations(GPT3, layout, MEGATRON)

    assert full == pytest.approx(8 * 12 * layer.input + layer.all)
    assert selective == pytest.approx(8 * 12 * (layer.replicated + layer.split) + layer.scores)


def test_the_last_stage_is_the_fullest_where_the_vocabulary_is_large():
    shape = replace(GPT3, layers=2, vocabulary=2_000_000)
    memory = estimate_memory(shape, Layout(pipeline=2, microbatches=1), MEGATRON)

    assert memory.activations > 2048 * 2_000_000 * 6
    assert memory.weights > 2 * 2_000_000 * 12288


def test_autocast_holds_a_cast_copy_of_the_weights():
    shape = KNOWN_SHAPES["gpt2"]
    bf16 = estimate_memory(shape, Layout(), Software(precision=precision_named("bf16")))
    fp32 = estimate_memory(shape, Layout(), Software(precision=precision_named("fp32")))

    assert bf16.weights == pytest.approx(6 * shape.parameters)
    assert fp32.weights == pytest.approx(4 * shape.parameters)
    assert fp32.activations > 1.4 * bf16.activations
