"""How pipelines run: the schedule, and into how many microbatches a shard is divided. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import ConfigError

ScheduleName = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""gpipe: all forward passes, then all backward (Huang et al. 2019). 1f1b: one of each in turn as soon as that can be,
with at most as many microbatches under way as there are stages (Narayanan et al. 2019, "PipeDream")."""


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """The settings of all pipelines of a strategy.

    Args:
        schedule: one of ``SCHEDULES``.
        microbatches: parts of a shard.

    Raises:
        ConfigError: an unknown schedule.
    """

    schedule: ScheduleName
    microbatches: int

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule={self.schedule!r} is unknown, or does not work yet; choose {' or '.join(SCHEDULES)}"
            )


def choose_pipelining(schedule: ScheduleName, microbatches: int | None, stages: int) -> Pipelining:
    """The settings for ``stages`` stages.

    Args:
        schedule: its name.
        microbatches: None is two for every stage, of which the pipeline idles a third at most.
        stages: how many.

    Raises:
        ConfigError: an unknown schedule, or fewer microbatches than stages.

    Example:
        >>> choose_pipelining("1f1b", None, 4).microbatches
        8
    """
    if microbatches is None:
        return Pipelining(schedule=schedule, microbatches=2 * stages if stages > 1 else 1)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < stages:
        raise ConfigError(
            f"microbatches={microbatches!r} leave some of {stages} stages idle all the time; give at least {stages}, "
            f"better {2 * stages} or more"
        )
    return Pipelining(schedule=schedule, microbatches=microbatches)
