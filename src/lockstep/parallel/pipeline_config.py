"""The settings of pipelines: schedules, microbatches, and which stages a worker holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

from lockstep.checks import check_choice, shown
from lockstep.errors import ConfigError

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""Each is a class of torch.distributed.pipelining; docs/concepts/schedules.md explains them."""
_STAGES_PER_WORKER: Mapping[ScheduleName, tuple[int, float]] = {  # the least and the most
    "1f1b": (1, 1), "gpipe": (1, 1), "interleaved": (2, inf), "zero_bubble": (1, inf), "zero_bubble_v": (2, 2)
}  # fmt: skip
_IN_ROUNDS = ("interleaved", "zero_bubble")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The settings of a strategy's pipelines. Raises a ConfigError if the schedule does not support them."""

    schedule: ScheduleName
    microbatches: int  # of a shard
    workers: int = 1  # of a pipeline; 1 for no pipeline
    stages_per_worker: int = 1

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.workers == 1:
            return
        count, (least, most) = self.stages_per_worker, _STAGES_PER_WORKER[self.schedule]
        if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
            raise ConfigError(
                f"stages_per_worker={count!r} does not go with schedule={self.schedule!r}, which has "
                f"{least if least == most else f'{least} or more'} stages on each worker; leave it out"
            )
        # These schedules take microbatches in rounds of equal length, of as many as there are workers or more.
        if self.schedule in _IN_ROUNDS and self.microbatches % max(1, self.microbatches // self.workers):
            raise ConfigError(
                f"microbatches={self.microbatches} cannot be taken in equal rounds by {self.workers} workers, as "
                f"schedule={self.schedule!r} does; give a multiple of {self.workers}"
            )

    @property
    def stages(self) -> int:
        return self.workers * self.stages_per_worker

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages of a worker of the pipeline, ascending."""
        if self.schedule == "zero_bubble_v" and self.workers > 1:
            return worker, self.stages - 1 - worker
        return tuple(range(worker, self.stages, self.workers))

    def worker_of(self, stage: int) -> int:
        """The worker of the pipeline that holds a stage."""
        return next(worker for worker in range(self.workers) if stage in self.stages_of(worker))

    @property
    def last_worker(self) -> int:
        """The worker of the pipeline that holds the last stage, and has the outputs."""
        return self.worker_of(self.stages - 1)


def choose_pipeline_config(
    schedule: ScheduleName, microbatches: int | None, workers: int, stages_per_worker: int | None = None
) -> PipelineConfig:
    """The settings for a pipeline. None is two microbatches a worker; two stages where the schedule has several."""
    if stages_per_worker is not None and workers == 1:
        raise ConfigError(
            f"stages_per_worker={stages_per_worker} is about pipelines, and pipeline=1 is none; leave it out"
        )
    if stages_per_worker is None:
        stages_per_worker = 1 if workers == 1 or _STAGES_PER_WORKER.get(schedule, (1, 1))[1] == 1 else 2
    if microbatches is None:
        microbatches = 2 * workers if workers > 1 else 1
    # The one microbatch of GPipe is for modules that must see all rows of a shard at once, such as batch norm.
    least = 1 if schedule == "gpipe" and microbatches == 1 else workers
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < least:
        raise ConfigError(
            f"microbatches={shown(microbatches)} leave some of {workers} workers idle all the time; "
            f"give at least {workers}, better {2 * workers} or more"
        )
    return PipelineConfig(
        schedule=schedule, microbatches=microbatches, workers=workers, stages_per_worker=stages_per_worker
    )
