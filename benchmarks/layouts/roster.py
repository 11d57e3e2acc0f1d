"""Which layouts are measured, in the order of the table, and the model that all of them train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError
from lockstep.plan.layout import Layout
from lockstep.recipes.config_checks import at_least

WORKERS = 4
_IN_PARTS = ("interleaved", "zero_bubble", "zero_bubble_v")
"""Schedules with which a worker of a pipeline has two parts."""


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """The step that is measured: a GPT-2 whose weights outweigh the activations of its short lines.

    Args:
        layers: of the model.
        hidden: width of a token's vector.
        heads: attention heads.
        vocabulary: tokens that have an embedding.
        rows: lines in a global batch.
        tokens: in each of them.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 16384
    rows: int = 8
    tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "rows", "tokens"):
            at_least(name, getattr(self, name), 1)

    def config(self) -> dict[str, Any]:
        """The model in the words of transformers' ``GPT2Config``."""
        return {
            "model_type": "gpt2",
            "vocab_size": self.vocabulary,
            "n_positions": self.tokens,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "bos_token_id": None,
            "eos_token_id": None,
        }


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """One row of the table.

    Args:
        asked: the arguments of ``ls.ParallelStrategy``.
        workers: how many there are.
    """

    asked: Mapping[str, Any] = field(default_factory=dict)
    workers: int = WORKERS

    @property
    def name(self) -> str:
        """What it is called."""
        return ", ".join(f"{name}={value}" for name, value in self.asked.items()) or "one worker"

    def planned(self, work: LayoutWork) -> Layout:
        """The same for ``lockstep plan``: two microbatches for each stage of a pipeline, where rows suffice."""
        degrees = {"data": 1, "pipeline": 1, "tensor": 1, **self.asked}
        shard = work.rows // degrees["data"]
        microbatches = min(shard, 2 * degrees["pipeline"]) if degrees["pipeline"] > 1 else 1
        chunks = 2 if self.asked.get("schedule") in _IN_PARTS else 1
        return Layout(
            **degrees, microbatch_size=shard // microbatches, microbatches=microbatches, stages_per_worker=chunks
        )


_LAYOUTS = (
    MeasuredLayout(workers=1),
    MeasuredLayout(asked={"data": 4}),
    MeasuredLayout(asked={"data": 4, "shard_optimizer": True}),
    MeasuredLayout(asked={"data": 4, "shard_parameters": True}),
    MeasuredLayout(asked={"tensor": 2}, workers=2),
    MeasuredLayout(asked={"tensor": 2, "sequence_parallel": True}, workers=2),
    MeasuredLayout(asked={"tensor": 4}),
    MeasuredLayout(asked={"pipeline": 2, "schedule": "zero_bubble"}, workers=2),
    MeasuredLayout(asked={"pipeline": 2, "schedule": "zero_bubble_v"}, workers=2),
    MeasuredLayout(asked={"pipeline": 4}),
    MeasuredLayout(asked={"data": 2, "tensor": 2}),
    MeasuredLayout(asked={"data": 2, "tensor": 2, "shard_optimizer": True}),
    MeasuredLayout(asked={"data": 2, "tensor": 2, "shard_parameters": True}),
    MeasuredLayout(asked={"data": 2, "pipeline": 2}),
    MeasuredLayout(asked={"data": 2, "pipeline": 2, "shard_optimizer": True}),
    MeasuredLayout(asked={"data": 2, "pipeline": 2, "shard_parameters": True}),
    MeasuredLayout(asked={"pipeline": 2, "tensor": 2}),
)


def chosen(names: Sequence[str] | None) -> tuple[MeasuredLayout, ...]:
    """All layouts, or those that are named.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    known = [layout.name for layout in _LAYOUTS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)} names no layout; choose from {', '.join(map(repr, known))}")
    return tuple(layout for layout in _LAYOUTS if names is None or layout.name in names)
