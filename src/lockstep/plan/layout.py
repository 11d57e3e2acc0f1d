"""A layout: how a model's work is divided among devices. It knows whether it divides evenly, and says what would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import ConfigError
from lockstep.plan.shape import ModelShape, divisors, one_of

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v"]
RecomputeName = Literal["none", "selective", "full"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
RECOMPUTES: tuple[RecomputeName, ...] = get_args(RecomputeName)
_SEVERAL, _USUAL_CHUNKS = ("interleaved", "zero_bubble", "zero_bubble_v"), 2
"""Schedules of which a stage has several parts, and how many ``ls.ParallelStrategy`` gives it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of training on ``data * pipeline * tensor`` devices.

    Devices are numbered through tensor ranks first, then data, then pipeline, so that those who exchange most share a
    host (Narayanan et al. 2021, section 5.2).

    Args:
        data: copies of the model.
        pipeline: stages.
        tensor: devices that share each layer.
        rows: lines in a microbatch.
        microbatches: for each copy, in a step.
        schedule: order of microbatches in the pipeline; "1f1b" where there is one stage.
        chunks: parts of the model that each worker of a pipeline holds; above 1 only where the schedule knows several,
            and 2 with "zero_bubble_v".
        recompute: activations that the backward pass computes again: those of whole layers, of attention's scores,
            or none.
        shard_optimizer: optimizer state is divided among the copies (ZeRO stage 1).
        shard_parameters: weights and gradients are divided among the copies too, and weights borrowed layer by layer
            (ZeRO stage 3, PyTorch's FSDP).
        sequence_parallel: norms and dropout are divided among tensor ranks along the sequence.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    rows: int = 1
    microbatches: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    recompute: RecomputeName = "none"
    shard_optimizer: bool = False
    shard_parameters: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "pipeline", "tensor", "rows", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} was given; choose one of {', '.join(SCHEDULES)}")
        if self.recompute not in RECOMPUTES:
            raise ConfigError(f"recompute={self.recompute!r} was given; choose one of {', '.join(RECOMPUTES)}")
        if self.chunks > 1 and self.schedule not in _SEVERAL:
            raise ConfigError(
                f"chunks={self.chunks} was given with schedule={self.schedule!r}, which has one part a stage;"
                " choose schedule='interleaved'"
            )
        if self.schedule == "zero_bubble_v" and self.chunks != _USUAL_CHUNKS:
            raise ConfigError(f"chunks={self.chunks} was given with schedule='zero_bubble_v', expected 2")

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def batch(self) -> int:
        """Lines in the global batch."""
        return self.data * self.microbatches * self.rows

    @property
    def divides_backward(self) -> bool:
        """Whether weights have their gradients later than inputs have theirs."""
        return self.pipeline > 1 and self.schedule in ("zero_bubble", "zero_bubble_v")

    @property
    def options(self) -> int:
        """How many things it asks for beyond degrees and microbatches."""
        asked = (self.schedule != "1f1b", self.chunks > 1, self.recompute != "none")
        return sum((*asked, self.shard_optimizer, self.shard_parameters, self.sequence_parallel))

    def call(self) -> str:
        """The ``ls.ParallelStrategy(...)`` that asks for it; what has its default is left out."""
        words = [f"data={self.data}", f"pipeline={self.pipeline}", f"tensor={self.tensor}"]
        if self.pipeline > 1:
            words.append(f"microbatches={self.microbatches}")
        if self.pipeline > 1 and self.schedule != "1f1b":
            words.append(f'schedule="{self.schedule}"')
        if self.pipeline > 1 and self.schedule in _SEVERAL and self.chunks != _USUAL_CHUNKS:
            words.append(f"stages_per_worker={self.chunks}")
        options = ("shard_optimizer", "shard_parameters", "sequence_parallel")
        words += [f"{name}=True" for name in options if getattr(self, name)]
        return f"ls.ParallelStrategy({', '.join(words)})"


def why_not(
    shape: ModelShape, *, data: int, pipeline: int, tensor: int, batch: int, even_stages: bool = True
) -> str | None:
    """Why degrees do not divide a model and a global batch, with those that would; None where they do.

    Args:
        shape: the model.
        data: copies.
        pipeline: stages.
        tensor: devices that share a layer.
        batch: lines in the global batch.
        even_stages: every stage has as many layers as any other.
    """
    if not even_stages and pipeline > shape.layers:
        return f"pipeline={pipeline} is more stages than layers={shape.layers}; choose at most {shape.layers}"
    for degree, value, parts in (
        ("tensor", tensor, (("heads", shape.heads), ("hidden", shape.hidden), ("feed_forward", shape.feed_forward))),
        ("tensor", tensor, (("kv_heads", shape.kv_heads),)),
        ("pipeline", pipeline if even_stages else 1, (("layers", shape.layers),)),
        ("data", data, (("the global batch", batch),)),
    ):
        for name, size in parts:
            if size % value:
                return f"{degree}={value} does not divide {name}={size}; choose {one_of(divisors(size))}"
    return None
