"""A layout: how a model's work is divided among devices. It knows whether it divides evenly, and says what would."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from lockstep.errors import ConfigError
from lockstep.plan.shapes import ModelShape, divisors, one_of

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


@dataclass(frozen=True, kw_only=True)
class PipelineWorker:
    """One worker of a pipeline, or the only one.

    Args:
        layers: of all its parts.
        held: of each layer as many times as there are microbatches whose activations it holds at once, at most.
        first: of these, those of the microbatch whose backward pass ends first.
        parts: how many it has.
        words: it has the embeddings.
        head: it has the head and the loss.
        losses: microbatches of which it keeps what the loss computed, beside the one at work.
        pending: passes of one part whose weights' gradients are still to come, beside the one at work.
    """

    layers: float
    held: float
    first: float
    parts: int = 1
    words: bool = True
    head: bool = True
    losses: int = 0
    pending: int = 0


def split_evenly(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """How many layers each stage gets where all cost the same, as ``parallel.pipeline_config`` finds it.

    Args:
        layers: how many.
        stages: how many; at most as many.
        head: what the last stage has besides, in layers.

    Example:
        >>> split_evenly(8, 4, 1.5)
        (2, 2, 3, 1)
    """
    if stages == 1:
        return (layers,)

    def cost(last: int) -> tuple[float, float, int]:
        """Of so many layers in the last stage: the slowest stage, and how uneven they are; of equals that with more."""
        each, more = divmod(layers - last, stages - 1)
        rest = more * (each + 1) ** 2 + (stages - 1 - more) * each**2
        return max(each + (more > 0), last + head), rest + (last + head) ** 2, -last

    last = min(range(1, layers - stages + 2), key=cost)
    each, more = divmod(layers - last, stages - 1)
    return (*[each] * (stages - 1 - more), *[each + 1] * more, last)


def pipeline_workers(shape: ModelShape, layout: Layout, *, balanced: bool) -> tuple[PipelineWorker, ...]:
    """The first worker, the first of those with most layers, and the last, each once.

    Args:
        shape: the model.
        layout: how it is divided.
        balanced: stages are as equal as whole layers and the head allow; else all have equally many layers.
    """
    head = shape.vocabulary * shape.hidden / shape.layer_parameters if balanced else 0.0
    return _workers(shape.layers, layout.pipeline, layout.microbatches, layout.schedule, layout.chunks, head)


@lru_cache(maxsize=4096)
def _workers(
    layers: int, workers: int, microbatches: int, schedule: ScheduleName, chunks: int, head: float
) -> tuple[PipelineWorker, ...]:
    if workers == 1:
        return (PipelineWorker(layers=layers, held=layers, first=layers),)
    stages = workers * chunks
    sizes = split_evenly(layers, stages, head) if head else (layers / stages,) * stages
    own = [[sizes[stage] for stage in stages_of(worker, workers, schedule, chunks)] for worker in range(workers)]
    totals = [sum(parts) for parts in own]
    return tuple(
        PipelineWorker(
            layers=totals[worker],
            held=_held_layers(own[worker], parts_held(worker, workers, microbatches, schedule, chunks)),
            first=own[worker][0],
            parts=chunks,
            words=worker == 0,
            head=worker == (0 if schedule == "zero_bubble_v" else workers - 1),
            losses=microbatches - 1 if schedule == "gpipe" else 0,
            pending=min(worker, microbatches - 1) if schedule == "zero_bubble" else 0,
        )
        for worker in dict.fromkeys((0, totals.index(max(totals)), workers - 1))
    )


def stages_of(worker: int, workers: int, schedule: ScheduleName, chunks: int) -> tuple[int, ...]:
    """The numbers of a worker's stages, ascending."""
    if schedule == "zero_bubble_v":
        return worker, 2 * workers - 1 - worker
    return tuple(range(worker, workers * chunks, workers))


def parts_held(
    worker: int, workers: int, microbatches: int, schedule: ScheduleName, chunks: int
) -> int | tuple[int, int]:
    """Of how many microbatches and parts a worker holds activations at once, at most; of a V those of each part.

    Those whose gradients of weights are still to come count: torch keeps all that is needed until then.
    """
    together = microbatches // max(1, microbatches // workers)  # microbatches that a part takes before the next
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, workers - worker)
    if schedule == "zero_bubble_v":
        return min(microbatches, 2 * workers - 1 - worker), min(microbatches, worker + 1)
    # Korthikanti et al. 2022, section 4.2.3: of L/p layers a worker 1 + (p - 1)/(p m) times p are held by the first.
    ahead = 2 * (workers - 1 - worker) + 1 if schedule == "interleaved" else workers
    return min(chunks * microbatches, (chunks - 1) * together + ahead)


def _held_layers(parts: list[float], held: int | tuple[int, int]) -> float:
    if isinstance(held, tuple):
        return sum(size * times for size, times in zip(parts, held, strict=True))
    return held * sum(parts) / len(parts)
