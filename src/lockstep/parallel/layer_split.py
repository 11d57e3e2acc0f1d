"""Splits the layers of a model among the stages of a pipeline. Pure.

Stages are runs of layers: the first also has the embeddings, which cost nothing, the last the head. The
slowest stage sets the pace, so the split is the one whose largest cost is the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import PipelineConfig


def check_layers(pipelining: PipelineConfig, layers: int) -> None:
    """Raises a ConfigError if there are more stages than a model has layers."""
    per_worker, workers = pipelining.stages_per_worker, pipelining.workers
    if pipelining.stages > layers:
        raise ConfigError(
            f"pipeline={workers} with {per_worker} stages on each worker is {pipelining.stages} stages, and the model "
            f"has {layers} layers; choose pipeline up to {max(1, layers // per_worker)}, or fewer stages on each worker"
        )


def split_layers(costs: Sequence[float], stages: int, *, after: float = 0.0) -> tuple[int, ...]:
    """How many layers each stage gets, in order, so that the slowest stage is as fast as possible.

    ``costs`` are those of the layers, as many as there are stages or more; ``after`` is the rest of the last stage's.
    """
    sums = [0.0, *accumulate(costs)]
    # By the number of layers that the stages so far hold: the largest cost, the sum of squares, and the split. Of
    # splits that are as fast as each other the most even one is taken.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extra = after if stage == stages - 1 else 0.0
        best = {
            end: min(
                (max(slowest, cost), squares + cost**2, (*split, end - begin))
                for begin, (slowest, squares, split) in best.items()
                if begin < end
                for cost in [sums[end] - sums[begin] + extra]
            )
            for end in range(stage + 1, len(costs) + 1)
        }
    return best[len(costs)][2]


def check_split(counts: Sequence[int], stages: int, layers: int) -> tuple[int, ...]:
    """Returns a user's number of layers of each stage; raises a ConfigError if they do not fit."""
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline_split={tuple(counts)!r} does not divide {layers} layers into {stages} stages; give {stages} "
            f"numbers from 1 that add up to {layers}"
        )
    return tuple(counts)
