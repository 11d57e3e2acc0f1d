"""Memory against the formulas and figures of the papers that it is taken from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep_tools.plan.assumptions import PRECISIONS, Software
from lockstep_tools.plan.division import Division, pipeline_workers
from lockstep_tools.plan.memory import WorkerMemory, estimate_memory, layer_activations
from lockstep_tools.plan.shapes import KNOWN_SHAPES, shape_of

GPT3 = KNOWN_SHAPES["gpt-3"]
MEGATRON = Software(
    precision=PRECISIONS["mixed"],
    fused_attention=False,
    static_buffers=False,
)
SBH = 2048 * 12288
SCORES = 5 * 96 * 2048 / 12288  # 5 a s / h


def test_a_layer_keeps_what_korthikanti_et_al_count():
    """Their table 2, for 16-bit activations: s b h (10 + 24/t + 5 a s/(h t)) and its variants."""
    one = layer_activations(GPT3, Division(), MEGATRON)
    eight = layer_activations(GPT3, Division(tensor=8), MEGATRON)
    along = layer_activations(GPT3, Division(tensor=8, sequence_parallel=True), MEGATRON)

    assert one.saved == pytest.approx(SBH * (34 + SCORES))
    assert eight.saved == pytest.approx(SBH * (10 + 24 / 8 + SCORES / 8))
    # The inputs of two products are gathered, and saved so: 2 of 16 bits.
    assert along.saved == pytest.approx(SBH * ((34 + SCORES) / 8 + 2 * 2 * 7 / 8))
    assert one.input == pytest.approx(2 * SBH)


def test_fused_attention_keeps_no_scores():
    fused = replace(MEGATRON, fused_attention=True)
    assert layer_activations(GPT3, Division(tensor=8), fused).saved == pytest.approx(SBH * (10 + 24 / 8))


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "held"),
    [
        ("gpipe", 1, 40, 40),
        ("1f1b", 1, 40, 8),
        ("1f1b", 1, 3, 3),
        ("zero_bubble", 1, 40, 8),
        ("zero_bubble_v", 2, 40, 8),
        ("interleaved", 3, 40, 8 * (1 + 7 / 24)),  # L (1 + (p - 1)/(p m)) layers
    ],
)
def test_microbatches_under_way_follow_the_schedule(schedule, chunks: int, microbatches: int, held: float):
    division = Division(pipeline=8, microbatches=microbatches, schedule=schedule, stages_per_worker=chunks)
    first, *_ = pipeline_workers(GPT3, division)
    assert first.live_layers / first.layers == pytest.approx(held)


def test_state_is_that_of_the_zero_paper():
    """Its figure 1: 7.5 billion parameters, 64 devices: 120 GB, and 31.4 GB with the optimizer's state divided."""
    shape = replace(KNOWN_SHAPES["megatron-7.5b"], vocabulary=1, embedding_rows=0)
    whole = estimate_memory(shape, Division(data=64), MEGATRON)
    divided = estimate_memory(shape, Division(data=64, shard_optimizer=True), MEGATRON)

    def state(memory):
        return (memory.weights + memory.gradients + memory.optimizer) / shape.parameters

    assert state(whole) * 7.5 == pytest.approx(120)
    assert state(divided) * 7.5 == pytest.approx(31.4, abs=0.05)


def test_tensor_ranks_make_the_gradient_of_all_words():
    """As DTensor's embedding does; their own part is then cut out, beside the one that is there already."""
    shape, division = KNOWN_SHAPES["gpt2"], Division(pipeline=2, tensor=2, microbatches=4)
    software = Software(precision=PRECISIONS["fp32"])
    first = pipeline_workers(shape, division)[0]
    memory = WorkerMemory(shape, division, software, first).estimate()
    words = 4 * shape.vocabulary * shape.hidden

    kept = layer_activations(shape, division, software).saved * first.layers
    assert first.live_layers == 2 * first.layers
    assert memory.backward_end == pytest.approx(kept + memory.gradients + words + words / 2)


def test_a_stage_has_buffers_for_every_microbatch():
    division = Division(pipeline=8, microbatches=64)
    first, last = (
        WorkerMemory(GPT3, division, replace(MEGATRON, static_buffers=True), worker).estimate().buffers
        for worker in pipeline_workers(GPT3, division)
    )
    assert first == last == 64 * 2 * SBH  # those between have as many for what comes back as for what comes


def test_recomputation_keeps_inputs_and_one_layer_at_work():
    division = Division(pipeline=8, tensor=8, microbatches=64)
    full = estimate_memory(GPT3, replace(division, activation_checkpointing="full"), MEGATRON).activations
    layer = layer_activations(GPT3, division, MEGATRON)
    assert full == pytest.approx(8 * 12 * layer.input + layer.saved)


def test_the_last_stage_is_the_fullest_where_the_vocabulary_is_large():
    shape = replace(GPT3, layers=2, vocabulary=2_000_000)
    memory = estimate_memory(shape, Division(pipeline=2, microbatches=1, microbatch_size=8), MEGATRON)
    assert memory.activations > 8 * 2048 * 2_000_000 * 6
    assert memory.weights > 2 * 2_000_000 * 12288


def test_autocast_holds_a_cast_copy_of_the_weights():
    shape = KNOWN_SHAPES["gpt2"]
    bf16 = estimate_memory(shape, Division(), Software(precision=PRECISIONS["bf16"]))
    fp32 = estimate_memory(shape, Division(), Software(precision=PRECISIONS["fp32"]))
    assert bf16.weights == pytest.approx(6 * shape.parameters)
    assert fp32.weights == pytest.approx(4 * shape.parameters)
    assert fp32.activations > 1.4 * bf16.activations


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_of_transformers_keeps_what_is_counted(family: str, precision: str):
    """The tensors that autograd really saves for two layers more, dropout off; weights and their casts left out."""
    config, make = _family(family)
    shape = replace(shape_of(config.to_dict()), saved=replace(shape_of(config.to_dict()).saved, masks=0))
    ids = torch.zeros(3, shape.sequence, dtype=torch.long)

    def saved(layers: int) -> int:
        config.num_hidden_layers = layers
        module = make(config)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return _saved_bytes(module, lambda: module(ids, **({} if family == "bert" else {"use_cache": False})))

    counted = layer_activations(shape, Division(microbatch_size=3), Software(precision=PRECISIONS[precision])).saved

    assert (saved(3) - saved(1)) / 2 == pytest.approx(counted, rel=0.03)


def _family(family: str) -> tuple[Any, Callable[[Any], torch.nn.Module]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 100, "max_position_embeddings": 64, "hidden_size": 96, "num_attention_heads": 4}
    if family == "gpt2":
        no_dropout = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0, "bos_token_id": 1, "eos_token_id": 1}
        gpt2 = {"vocab_size": 100, "n_positions": 64, "n_embd": 96, "n_head": 4, "n_layer": 1}
        return transformers.GPT2Config(**gpt2, **no_dropout), transformers.GPT2Model
    if family == "bert":
        no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        config = transformers.BertConfig(**sizes, **no_dropout, num_hidden_layers=1, intermediate_size=200)
        return config, lambda config: transformers.BertModel(config, add_pooling_layer=False)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, intermediate_size=200)
    return config, transformers.LlamaModel


def _saved_bytes(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes of the storages that autograd saves, each once."""
    own = {tuple(parameter.shape) for parameter in module.parameters()}
    own |= {shape[::-1] for shape in own}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in own:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is given twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = run()
    total = sum(size for size, _ in found.values())
    del outputs
    return total
