"""Which choices are measured, in the order of the table, and the work that all of them do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import ConfigError
from lockstep.recipes.config_checks import at_least
from lockstep.recipes.memory import Lora, MemoryChoices, loading
from lockstep.train.compile import PrecisionName

FULL = "full, fp32"
"""What the others are compared with: nothing is done."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One row of the table.

    Args:
        name: what it is called.
        choices: what is done.
        precision: of the forward pass.
    """

    name: str
    choices: MemoryChoices
    precision: PrecisionName = "fp32"


@dataclass(frozen=True, kw_only=True)
class ReviewsWork:
    """The step that is measured: the reviews' classifier in the size of BERT-base, on Chinese BERT's vocabulary.

    Args:
        layers: encoder layers.
        hidden: width of a token's vector.
        heads: attention heads.
        feed_forward: width inside a layer's feed-forward part.
        vocabulary: tokens that have an embedding.
        rows: reviews in a global batch.
        tokens: in each of them.
        replicas: shares of the CPU.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    feed_forward: int = 3072
    vocabulary: int = 21128
    rows: int = 16
    tokens: int = 128
    replicas: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "feed_forward", "vocabulary", "tokens", "replicas"):
            at_least(name, getattr(self, name), 1)
        at_least("rows", self.rows, self.replicas)


_LORA = Lora(r=8)
_CHOICES = (
    Choice(name=FULL, choices=MemoryChoices()),
    Choice(name="bf16", choices=MemoryChoices(), precision="bf16"),
    Choice(name="checkpointing", choices=MemoryChoices(gradient_checkpointing=True)),
    Choice(name="bf16 + checkpointing", choices=MemoryChoices(gradient_checkpointing=True), precision="bf16"),
    Choice(name="LoRA", choices=MemoryChoices(lora=_LORA)),
    Choice(name="LoRA + checkpointing", choices=MemoryChoices(lora=_LORA, gradient_checkpointing=True)),
    Choice(name="LoRA + bf16", choices=MemoryChoices(lora=_LORA, load_in="bf16"), precision="bf16"),
    Choice(
        name="LoRA + bf16 + checkpointing",
        choices=MemoryChoices(lora=_LORA, load_in="bf16", gradient_checkpointing=True),
        precision="bf16",
    ),
    Choice(name="LoRA + 8-bit", choices=MemoryChoices(lora=_LORA, load_in="8bit"), precision="bf16"),
    Choice(name="LoRA + 4-bit", choices=MemoryChoices(lora=_LORA, load_in="4bit"), precision="bf16"),
)


def chosen(names: Sequence[str] | None) -> tuple[Choice, ...]:
    """All choices, or those that are named, and always what they are compared with.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    known = [choice.name for choice in _CHOICES]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} names no choice; choose from {', '.join(map(repr, known))}")
    return tuple(choice for choice in _CHOICES if names is None or choice.name in (FULL, *names))


def why_not(choice: Choice, device: torch.device) -> str:
    """Why a choice cannot be measured on ``device``; empty if it can."""
    try:
        loading(choice.choices, device)
    except (ConfigError, ImportError) as error:
        return str(error)
    return ""
