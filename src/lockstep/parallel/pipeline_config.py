"""The settings of pipelines, and which layers each stage holds. Pure.

Stages are runs of layers: the first also has the embeddings, which cost nothing, the last the head. The
slowest stage sets the pace, so the split is the one whose largest cost is the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import add
from types import MappingProxyType
from typing import Literal, get_args

from lockstep.errors import ConfigError

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""gpipe: all forward passes, then all backward (Huang et al. 2019).
1f1b: one of each in turn as soon as possible, with at most as many microbatches in flight as there are stages
(Narayanan et al. 2019, "PipeDream").
interleaved: the same with several stages on each worker, each a smaller part of the model (Narayanan et al. 2021, arXiv
2104.04473, section 2.2).
zero_bubble: the backward pass in two, for the inputs and for the weights; no worker waits for the second, so it fills
idle time ("ZB1P" of Qi et al. 2023, arXiv 2401.10241).
zero_bubble_v: the same with two stages on each worker, the second ones in reverse order, so that the first worker has
the embeddings and the outputs ("ZB-V", section 6 there)."""
_STAGES_PER_WORKER: Mapping[ScheduleName, tuple[int, float]] = MappingProxyType(
    {"1f1b": (1, 1), "gpipe": (1, 1), "interleaved": (2, inf), "zero_bubble": (1, inf), "zero_bubble_v": (2, 2)}
)
"""The least and the most."""
_IN_ROUNDS = ("interleaved", "zero_bubble")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The settings of a strategy's pipelines.

    Args:
        schedule: one of ``SCHEDULES``.
        microbatches: the number of microbatches of a shard.
        workers: the number of workers of a pipeline; 1 for no pipeline.
        stages_per_worker: the number of stages that each worker holds.

    Raises:
        ConfigError: an unknown schedule, or numbers that it does not support.
    """

    schedule: ScheduleName
    microbatches: int
    workers: int = 1
    stages_per_worker: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is unknown; choose {', '.join(SCHEDULES)}")
        if self.workers > 1:
            _check_stages(self.schedule, self.stages_per_worker)
            _check_rounds(self.schedule, self.microbatches, self.workers)

    @property
    def stages(self) -> int:
        return self.workers * self.stages_per_worker

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages of a worker of the pipeline, ascending.

        Example:
            >>> PipelineConfig(schedule="zero_bubble_v", microbatches=4, workers=2, stages_per_worker=2).stages_of(0)
            (0, 3)
        """
        if self.schedule == "zero_bubble_v" and self.workers > 1:
            return worker, self.stages - 1 - worker
        return tuple(range(worker, self.stages, self.workers))

    @property
    def last_worker(self) -> int:
        """The worker of the pipeline that holds the last stage, and has the outputs."""
        return next(worker for worker in range(self.workers) if self.stages - 1 in self.stages_of(worker))


def choose_pipeline_config(
    schedule: ScheduleName, microbatches: int | None, workers: int, stages_per_worker: int | None = None
) -> PipelineConfig:
    """The settings for a pipeline.

    Args:
        schedule: its name.
        microbatches: None is two for every worker.
        workers: the number of workers; 1 is no pipeline.
        stages_per_worker: None is two for schedules with several, else one.

    Raises:
        ConfigError: an unknown schedule, fewer microbatches than workers, or numbers that it does not support.

    Example:
        >>> choose_pipeline_config("1f1b", None, 4).microbatches
        8
        >>> choose_pipeline_config("interleaved", None, 4).stages
        8
    """
    if stages_per_worker is not None and workers == 1:
        given = f"stages_per_worker={stages_per_worker}"
        raise ConfigError(f"{given} is about pipelines, and pipeline=1 is none; leave it out")
    if stages_per_worker is None:
        stages_per_worker = 1 if workers == 1 or _STAGES_PER_WORKER.get(schedule, (1, 1))[1] == 1 else 2
    if microbatches is None:
        microbatches = 2 * workers if workers > 1 else 1
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < workers:
        raise ConfigError(
            f"microbatches={microbatches!r} leave some of {workers} workers idle all the time; "
            f"give at least {workers}, better {2 * workers} or more"
        )
    return PipelineConfig(
        schedule=schedule, microbatches=microbatches, workers=workers, stages_per_worker=stages_per_worker
    )


def check_layers(pipelining: PipelineConfig, layers: int) -> None:
    """Raises a ConfigError if several stages per worker are more stages than a model has layers."""
    each, workers = pipelining.stages_per_worker, pipelining.workers
    if each == 1 or pipelining.stages <= layers:
        return
    fitting = [f"pipeline up to {layers // each}"] if layers // each > 1 else []
    if _STAGES_PER_WORKER[pipelining.schedule][0] <= layers // workers < each:
        fitting.append(f"stages_per_worker up to {layers // workers}")
    fitting.append(f'schedule="1f1b" with pipeline up to {layers}')
    raise ConfigError(
        f"pipeline={workers} with {each} stages on each worker is {pipelining.stages} stages, and the model has "
        f"{layers} layers; choose {' or '.join(fitting)}"
    )


def _check_stages(schedule: ScheduleName, each: int) -> None:
    least, most = _STAGES_PER_WORKER[schedule]
    if isinstance(each, bool) or not isinstance(each, int) or not least <= each <= most:
        raise ConfigError(
            f"stages_per_worker={each!r} goes with schedule={schedule!r}, which has "
            f"{least if least == most else f'{least} or more'} stages on each worker; leave it out, or choose another "
            f"schedule of {', '.join(SCHEDULES)}"
        )


def _check_rounds(schedule: ScheduleName, microbatches: int, workers: int) -> None:
    """Some schedules take microbatches in rounds of equal length, of as many as there are workers or more."""
    if schedule not in _IN_ROUNDS or _even(microbatches, workers):
        return
    lower = next(number for number in range(microbatches, 0, -1) if _even(number, workers))
    upper = next(number for number in range(microbatches, 2 * microbatches + workers) if _even(number, workers))
    raise ConfigError(
        f"microbatches={microbatches} cannot be taken in equal rounds by {workers} workers, as schedule={schedule!r} "
        f"does; give {lower} or {upper}"
    )


def _even(microbatches: int, workers: int) -> bool:
    return microbatches % max(1, microbatches // workers) == 0


def split_layers(costs: Sequence[float], stages: int, *, after: float = 0.0) -> tuple[int, ...]:
    """How many layers each stage gets, in order; at least one.

    Args:
        costs: the costs of the layers, in any unit.
        stages: the number of stages.
        after: the cost of the rest of the last stage, such as the head.

    Raises:
        ConfigError: fewer layers than stages.

    Example:
        >>> split_layers([1.0] * 8, 4, after=1.5)  # the head costs one and a half layers
        (2, 2, 3, 1)
    """
    if stages > len(costs):
        fitting = ", ".join(map(str, range(1, len(costs) + 1)))
        raise ConfigError(f"pipeline={stages} is more stages than the model has layers, {len(costs)}; choose {fitting}")
    sums = [0.0, *accumulate(costs)]

    def cost(begin: int, end: int, stage: int) -> float:
        own = sums[end] - sums[begin]
        return own + after if stage == stages - 1 else own

    slowest, _ = _best(len(costs), stages, cost, max)

    def square(begin: int, end: int, stage: int) -> float:
        own = cost(begin, end, stage)
        return own**2 if own <= slowest else inf

    _, split = _best(len(costs), stages, square, add)  # of all splits as fast as that the most even one
    return split


def _best(
    layers: int, stages: int, cost: Callable[[int, int, int], float], joined: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The split of the least cost: of layers ``begin`` to ``end`` in a stage, ``joined`` over the stages."""
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
    """Returns a user's number of layers of each stage; raises a ConfigError if they do not fit."""
    if len(given) != stages or sum(given) != layers or min(given) < 1:
        raise ConfigError(
            f"pipeline_split={tuple(given)!r} does not divide {layers} layers into {stages} stages; give {stages} "
            f"numbers from 1 that add up to {layers}"
        )
    return tuple(given)
