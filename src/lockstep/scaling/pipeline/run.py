"""A measurement of schedules from what was asked to the result that the report shows. It prints nothing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lockstep.scaling.machine import Machine, this_machine
from lockstep.scaling.pipeline.figures import Row, rows_of
from lockstep.scaling.pipeline.settings import PipelineSettings
from lockstep.scaling.pipeline.trial import Sample, run_trial

Progress = Callable[[Sample, int, int], None]
"""Called with each sample, how many there are by then, and how many there will be."""


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A run and how it was made.

    Args:
        settings: what was asked.
        date: YYYY-MM-DD.
        machine: where.
        command: that makes the run again.
        rows: one a schedule.
        samples: all of them.
    """

    settings: PipelineSettings
    date: str
    machine: Machine
    command: str
    rows: tuple[Row, ...]
    samples: tuple[Sample, ...]

    @property
    def crowded(self) -> bool:
        """Whether workers share cores: then one computes while another waits, and no bubble can be seen."""
        return self.settings.workers > self.machine.cores


def measure_pipeline(settings: PipelineSettings, *, output: Path, progress: Progress) -> PipelineResult:
    """Measures every schedule once a round, each time in fresh processes.

    Args:
        settings: what is measured.
        output: where the report will go, for the command in it.
        progress: told of each.

    Raises:
        ClusterError: a worker failed.
    """
    from lockstep.parallel.pipeline import orders_of  # imports torch's pipelining, which every command would wait for

    machine = this_machine()
    orders = {schedule: orders_of(settings.pipelining(schedule)) for schedule in settings.schedules}
    samples: list[Sample] = []
    for round in range(settings.rounds):
        for schedule in settings.schedules:
            samples.append(run_trial(settings, schedule, round=round))
            progress(samples[-1], len(samples), settings.rounds * len(settings.schedules))
    return PipelineResult(
        settings=settings,
        date=date.today().isoformat(),
        machine=machine,
        command=command_of(settings, output),
        rows=tuple(rows_of(settings, samples, orders)),
        samples=tuple(samples),
    )


def command_of(settings: PipelineSettings, output: Path) -> str:
    """The command that makes a run again."""
    flags = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    flags |= {"schedules": ",".join(settings.schedules), "output": output}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["lockstep", "bench", "pipeline", *words])
