"""The workers of a pipeline: which layers each has, and how much of which microbatches it holds at once. Pure.

Three of them can be the slowest or the fullest: the first, the last, and the first of those that have most layers. With
``zero_bubble_v`` a worker's second part comes in reverse order, so that the first worker has the head too.

What is held is counted in the schedules of ``torch.distributed.pipelining``; a test plays them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lockstep.plan.layout import Layout, ScheduleName
from lockstep.plan.shape import ModelShape


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
