"""Tiny models of transformers that differ in structure, in double precision, and the training of one of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tests import oracle
from torch import Tensor, nn

import lockstep as ls

WORDS, TOKENS, LABELS = 67, 6, 5  # no multiple of two words
SIZES = (5, 4, 1)  # the last leaves microbatches and replicas without rows
# fmt: off
_COMMON: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "use_cache": False,
}
_SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2}
_ENCODER = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _COMMON),
    "mistral": ("MistralForCausalLM", {**_COMMON, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**_COMMON, "tie_word_embeddings": True}),  # biases; one weight at both ends
    "qwen3": ("Qwen3ForCausalLM", {**_COMMON, "head_dim": 8}),  # norms of each head
    "gemma2": ("Gemma2ForCausalLM", {**_COMMON, **_SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", {**_COMMON, **_SLIDING, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3ForCausalLM", {**_COMMON, "resid_pdrop": 0.0}),  # fused projections
    "olmo2": ("Olmo2ForCausalLM", _COMMON),  # norms of all heads
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {**_COMMON, "hidden_dropout": 0.0, "attention_dropout": 0.0, "rotary_pct": 0.5},  # one projection
    ),
    "cohere": ("CohereForCausalLM", _COMMON),  # attention and feed-forward side by side
    "mixtral": ("MixtralForCausalLM", {**_COMMON, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_COMMON, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 12, "mlp_only_layers": [0], "head_dim": 8},
    ),
    "olmoe": ("OlmoeForCausalLM", {**_COMMON, **_EXPERTS, "num_experts": 4}),  # no pipeline plan of its own
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_COMMON, **_EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
            "moe_intermediate_size": 12, "first_k_dense_replace": 1,
        },
    ),
    "llama4_text": (  # experts whose outputs are added in place to those of a shared expert
        "Llama4ForCausalLM",
        {**_COMMON, **_EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 24, "head_dim": 8},
    ),
    "bert": ("BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 0}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "dropout": 0.0,
            "attention_dropout": 0.0, "max_position_embeddings": 32, "pad_token_id": 0,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
            "image_size": 8, "patch_size": 4, "num_labels": LABELS, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}
# fmt: on
Batch = tuple[dict[str, Tensor], Tensor]


@contextmanager
def in_double() -> Iterator[None]:
    """Has the models' norms and softmaxes, which compute in float32 whatever their inputs are, compute in float64.

    Sums of float32 differ by their order, which is what a division changes.
    """
    single, softmax, to, cast, as_single = torch.float32, F.softmax, Tensor.to, Tensor.type, Tensor.float

    def double(value: Any) -> Any:
        return torch.float64 if value is single else value

    def given(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(double, args), **{name: double(value) for name, value in kwargs.items()})

        return call

    names: Any = F
    tensors: Any = Tensor
    names.softmax, tensors.to, tensors.type, tensors.float = given(softmax), given(to), given(cast), Tensor.double
    try:
        yield
    finally:
        names.softmax, tensors.to, tensors.type, tensors.float = softmax, to, cast, as_single


def build(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    kind, sizes = TYPES[name]
    cls: Any = getattr(transformers, kind)
    torch.manual_seed(1)
    config = cls.config_class(**sizes, experts_implementation="eager")  # torch's grouped products take no float64
    model: nn.Module = cls(config).double()
    with torch.no_grad():  # away from ones and zeros, with which mistakes cancel out
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batches(name: str) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    found: list[Batch] = []
    for rows in SIZES:
        if name == "vit":
            images = torch.randn(rows, 3, 8, 8, generator=random, dtype=torch.float64)
            found.append(({"pixel_values": images}, torch.randint(LABELS, (rows,), generator=random)))
            continue
        words, targets = torch.randint(1, WORDS, (2, rows, TOKENS), generator=random)
        words[:, 1] = 34  # the first of the second rank's half of the vocabulary
        mask = torch.ones_like(words)
        words[0, TOKENS - 2 :] = mask[0, TOKENS - 2 :] = 0
        found.append(({"input_ids": words, "attention_mask": mask}, targets))
    return found


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of each word or image."""
    logits = outputs.logits
    return F.cross_entropy(logits if targets.ndim == 1 else logits.transpose(1, 2), targets, reduction="none")


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def train_all(names: list[str], grid: dict[str, Any], sequences: bool = False) -> dict[str, Any]:
    """What a grid of workers finds for each type: the losses and the weights, or the error that it ended with."""
    torch.set_num_threads(1)
    gc.freeze()  # else each collection looks through all that was imported
    strategy = ls.ParallelStrategy(
        seed=7, communication=ls.CommunicationOptions(lost_after_s=60), sequence_parallel=sequences, **grid
    )
    found: dict[str, Any] = {}
    with closing(strategy), strategy.scope(), in_double():
        for name in names:
            model = ls.Model(strategy.parallelize(build(name)))
            model.compile(optimizer, loss)
            history = model.fit(batches(name), verbose=0)
            found[name] = (history.history["loss"], {key: value.clone() for key, value in model.state_dict().items()})
            del model
            gc.collect()
    return found


def one_device(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same by hand."""
    with in_double():
        training = oracle.train(build(name), batches(name), optimizer, loss)
    return training.epoch_losses(1), dict(training.module.state_dict())


def run_jobs(experiments: list[tuple[str, dict[str, Any], list[str]]]) -> dict[str, Any]:
    """One grid after another, by its name: what it finds for each of the types."""
    return {label: train_all(names, grid) for label, grid, names in experiments}
