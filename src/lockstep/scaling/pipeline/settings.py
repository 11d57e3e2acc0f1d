"""What is asked of a measurement of schedules. Plain data that rejects bad values itself."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import SCHEDULES, Pipelining, ScheduleName, check_layers, choose_pipelining
from lockstep.recipes.config_checks import at_least, one_of


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """A small BERT with its head, and how it is measured.

    Args:
        schedules: their names.
        workers: processes that divide its layers.
        microbatches: parts of a batch.
        rows: lines in a microbatch.
        sequence: tokens in a line.
        layers: encoder layers.
        hidden: width of a token's vector, a multiple of 32.
        vocabulary: tokens that have an embedding.
        steps: timed steps of a trial.
        warm_up: steps before them, at least 1.
        rounds: how often each schedule is measured, in turn with the others.
    """

    schedules: tuple[ScheduleName, ...] = SCHEDULES
    workers: int = 2
    microbatches: int = 8
    rows: int = 8
    sequence: int = 64
    layers: int = 8
    hidden: int = 256
    vocabulary: int = 512
    steps: int = 6
    warm_up: int = 2
    rounds: int = 3

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 2)
        for name in ("rows", "sequence", "layers", "hidden", "vocabulary", "steps", "warm_up", "rounds"):
            at_least(name, getattr(self, name), 1)
        if self.hidden % _HEAD:
            raise ConfigError(f"hidden={self.hidden} is no multiple of {_HEAD}, the width of a head; give one")
        if not self.schedules:
            raise ConfigError(f"no schedule was named; choose some of {', '.join(SCHEDULES)}")
        for schedule in self.schedules:
            one_of("schedule", schedule, SCHEDULES)
            check_layers(self.pipelining(schedule), self.layers)

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.hidden // _HEAD

    def pipelining(self, schedule: ScheduleName) -> Pipelining:
        """How the strategy runs a schedule."""
        return choose_pipelining(schedule, self.microbatches, self.workers)


_HEAD = 32


def parse_schedules(text: str | None) -> tuple[ScheduleName, ...]:
    """Reads ``1f1b,zero_bubble``; None is all of them.

    Raises:
        ConfigError: an unknown name.
    """
    if text is None:
        return SCHEDULES
    names = [name.strip() for name in text.split(",")]
    for name in names:
        one_of("--schedules", name, SCHEDULES)
    return tuple(known for known in SCHEDULES if known in names)
