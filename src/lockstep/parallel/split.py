"""Which layers each stage of a pipeline holds: pure.

    costs    first stage: words | layers ... | last stage: head        stages are runs of layers, as equal as can be

The slowest stage sets the pace, so its cost is made as small as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from operator import add

from lockstep.errors import ConfigError


def split_layers(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """How many layers each stage gets, in order; at least one.

    Args:
        costs: of the layers, in any unit.
        stages: how many.
        before: what the first stage has besides, such as the embeddings.
        after: what the last stage has besides, such as the head.

    Raises:
        ConfigError: fewer layers than stages.

    Example:
        >>> split_layers([1.0] * 8, 4, after=1.5)  # the head weighs one and a half layers
        (2, 2, 3, 1)
    """
    if stages > len(costs):
        fitting = ", ".join(map(str, range(1, len(costs) + 1)))
        raise ConfigError(f"pipeline={stages} is more stages than the model has layers, {len(costs)}; choose {fitting}")
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int, stage: int) -> float:
        own = sums[end] - sums[begin]
        return own + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    slowest, _ = _best(len(costs), stages, cost, max)
    # Of all splits as fast as that the most even one.
    _, split = _best(len(costs), stages, lambda *run: _within(cost(*run), slowest) ** 2, add)
    return split


def _within(cost: float, limit: float) -> float:
    return cost if cost <= limit else inf


def _best(
    layers: int, stages: int, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The split of the least cost.

    Args:
        layers: how many.
        stages: how many.
        cost: of the layers from one up to another one in a stage.
        joined: the cost of two runs of stages.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0, end, 0), (end,)) for end in range(1, layers + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (joined(so_far, cost(begin, end, stage)), (*split, end - begin))
                for begin, (so_far, split) in best.items()
                if begin < end
            )
            for end in range(stage + 1, layers + 1)
        }
    return best[layers]


def check_split(given: Sequence[int], stages: int, layers: int) -> tuple[int, ...]:
    """A split of the user's own: the number of layers of each stage.

    Raises:
        ConfigError: another number of stages or of layers, or a stage without any.
    """
    if len(given) != stages or sum(given) != layers or min(given) < 1:
        raise ConfigError(
            f"pipeline_split={tuple(given)!r} does not divide {layers} layers into {stages} stages; give {stages} "
            f"numbers from 1 that add up to {layers}"
        )
    return tuple(given)
