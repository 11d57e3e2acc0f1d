"""What workers of a pipeline wait and hold, by formula, beside torch's own lists of actions, played out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

import pytest

from lockstep.parallel.layer_split import split_layers
from lockstep.parallel.pipeline import orders_of
from lockstep.parallel.pipeline_config import SCHEDULES, PipelineConfig, ScheduleName, choose_pipeline_config
from lockstep.parallel.pipeline_trace import Action, simulate
from lockstep_tools.plan.cost import Passes, bubble_seconds
from lockstep_tools.plan.division import Division, live_microbatches, split_evenly

# Forward, inputs, weights: alike as in the papers, and as layers have them, whose attention and norms have no weights.
COSTS = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (1.1, 1.9, 1.0), (1.0, 2.6, 0.6))


def pipelines(schedule: ScheduleName) -> Iterator[PipelineConfig]:
    """With 2 to 6 workers, microbatches from as many as workers up to three times as many, and up to 3 parts."""
    many = {"interleaved": (2, 3), "zero_bubble": (1, 2, 3)}.get(schedule, (None,))
    for workers in (2, 3, 4, 6):
        for microbatches in range(workers, 3 * workers + 1):
            in_rounds = microbatches % (microbatches // workers) == 0
            if in_rounds or schedule not in ("interleaved", "zero_bubble"):
                yield from (choose_pipeline_config(schedule, microbatches, workers, parts) for parts in many)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_waiting_is_that_of_torch_s_schedule(schedule: ScheduleName):
    for pipelining in pipelines(schedule):
        workers, microbatches, parts = pipelining.workers, pipelining.microbatches, pipelining.stages_per_worker
        division = Division(pipeline=workers, microbatches=microbatches, schedule=schedule, stages_per_worker=parts)
        orders = orders_of(pipelining)
        for forward, inputs, weights in COSTS:
            takes = {"forward": forward, "backward": inputs + weights, "inputs": inputs, "weights": weights}
            length = simulate(orders, lambda action, takes=takes, n=parts: takes[action.kind] / n).length  # type: ignore[misc]
            others = Passes(forward=forward, inputs=inputs, weights=weights)

            busy = microbatches * (forward + inputs + weights)
            assert busy + bubble_seconds(division, others) == pytest.approx(length, rel=1e-12), division


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_held_is_what_torch_s_schedule_holds(schedule: ScheduleName):
    for pipelining in pipelines(schedule):
        for worker, order in enumerate(orders_of(pipelining)):
            held = live_microbatches(worker, pipelining)
            counted = sum(held) if isinstance(held, tuple) else held
            assert most_held(order) == counted, (pipelining, worker)


def most_held(order: list[Action]) -> int:
    """The most passes that have gone forward and whose weights have no gradient yet."""
    steps = {"forward": 1, "backward": -1, "inputs": 0, "weights": -1}
    return max(accumulate(steps[action.kind] for action in order))


def test_the_parts_of_a_v_are_held_as_counted():
    for pipelining in pipelines("zero_bubble_v"):
        for worker, order in enumerate(orders_of(pipelining)):
            at: Counter[int] = Counter()
            seen = []
            for action in order:
                at[action.stage] += {"forward": 1, "weights": -1}.get(action.kind, 0)
                seen.append(tuple(at[stage] for stage in pipelining.stages_of(worker)))
            held = live_microbatches(worker, pipelining)

            assert held in [each for each in seen if sum(each) == max(map(sum, seen))]


def test_layers_are_divided_as_the_strategy_divides_them():
    for layers in (4, 7, 12, 24):
        for stages in range(1, layers + 1):
            for head in (0.13, 0.5, 1.0, 2.67, 9.4):
                assert split_evenly(layers, stages, head) == split_layers([1.0] * layers, stages, after=head)
