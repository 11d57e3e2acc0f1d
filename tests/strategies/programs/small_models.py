"""Small models of transformers' families, in double precision, and the batches and the loss to train them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 66  # no multiple of 4
LENGTH = 7
Batch = tuple[dict[str, Tensor], Tensor]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "bert": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "gpt2": lambda p: torch.optim.AdamW(p, 0.01),
    "llama": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
}


def build(name: str, *, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    if name == "plain":
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).double()
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).double()
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=32, max_position_embeddings=16, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).double()
    if name == "mixtral":
        config = transformers.MixtralConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=32, max_position_embeddings=16, num_local_experts=4, use_cache=False,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config).double()
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=layers, n_head=4, n_positions=16, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def batches(sizes: Sequence[int]) -> list[Batch]:
    """One of each size, in rows; the first row of each is a shorter text than the others."""
    random = torch.Generator().manual_seed(0)
    found = []
    for rows in sizes:
        words, targets = torch.randint(1, WORDS, (2, rows, LENGTH), generator=random)
        mask = torch.ones_like(words)
        mask[0, LENGTH - 2 :] = 0
        found.append(({"input_ids": words, "attention_mask": mask}, targets))
    return found


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of each word."""
    return F.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none")
