"""From measured timetables to the rows of the table: idle shares, measured and computed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lockstep.parallel.pipeline_config import ScheduleName
from lockstep.parallel.pipeline_trace import ActionKind, Orders, Timetable, textbook_bubble, timetable
from lockstep.scaling.pipeline.settings import PipelineSettings
from lockstep.scaling.pipeline.trial import Sample


@dataclass(frozen=True, kw_only=True)
class Row:
    """A schedule over all its rounds.

    Args:
        schedule: its name.
        stages_per_worker: of the model.
        steps: timed steps of all rounds.
        step_ms: from the first action to the last, median.
        busy_ms: of that, computing, on average over the workers, median.
        bubble: the measured idle share, median.
        lowest: of the rounds' medians.
        highest: of the rounds' medians.
        textbook: (S-1)/(M+S-1).
        own: what the schedule's timetable has if a backward pass takes twice a forward pass.
        with_costs: what it has if each action takes what it took on average.
        typical: the step whose idle share is the median.
    """

    schedule: ScheduleName
    stages_per_worker: int
    steps: int
    step_ms: float
    busy_ms: float
    bubble: float
    lowest: float
    highest: float
    textbook: float
    own: float
    with_costs: float
    typical: Timetable


def rows_of(settings: PipelineSettings, samples: Sequence[Sample], orders: dict[ScheduleName, Orders]) -> list[Row]:
    """A row for each schedule, in the order of the settings."""
    return [
        _row(settings, schedule, [each for each in samples if each.schedule == schedule], orders[schedule])
        for schedule in settings.schedules
    ]


def _row(settings: PipelineSettings, schedule: ScheduleName, samples: Sequence[Sample], orders: Orders) -> Row:
    steps = [step for sample in samples for step in sample.steps]
    rounds = [median(step.bubble for step in sample.steps) for sample in samples]
    in_order = sorted(steps, key=lambda step: step.bubble)
    return Row(
        schedule=schedule,
        stages_per_worker=settings.pipelining(schedule).stages_per_worker,
        steps=len(steps),
        step_ms=1000 * median(step.length for step in steps),
        busy_ms=1000 * median(step.length * (1 - step.bubble) for step in steps),
        bubble=median(step.bubble for step in steps),
        lowest=min(rounds),
        highest=max(rounds),
        textbook=textbook_bubble(settings.workers, settings.microbatches),
        own=timetable(orders).bubble,
        with_costs=_with_costs(orders, steps).bubble,
        typical=in_order[len(in_order) // 2],
    )


def _with_costs(orders: Orders, steps: Sequence[Timetable]) -> Timetable:
    """The timetable in which every action takes what those of its kind and stage took on average."""
    taken: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for step in steps:
        for slots in step.workers:
            for slot in slots:
                taken[slot.action.kind, slot.action.stage].append(slot.end - slot.begin)
    mean = {key: fmean(values) for key, values in taken.items()}
    return timetable(orders, lambda action: mean[action.kind, action.stage])
