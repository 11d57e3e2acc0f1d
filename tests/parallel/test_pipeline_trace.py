"""Timetables of pipelines: pure, on actions made by hand."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_trace import Action, ActionKind, PipelineTrace, simulate, textbook_bubble


def action(text: str) -> Action:
    """``"F0.1"``: the forward pass of microbatch 1 in stage 0."""
    kinds: dict[str, ActionKind] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
    stage, microbatch = text[1:].split(".")
    return Action(kind=kinds[text[0]], stage=int(stage), microbatch=int(microbatch))


def table(*orders: str) -> PipelineTrace:
    return simulate([[action(each) for each in order.split()] for order in orders])


def begins(found: PipelineTrace, worker: int) -> list[float]:
    return [slot.begin for slot in found.workers[worker]]


def test_an_action_begins_when_its_worker_is_free_and_what_it_needs_is_there():
    found = table("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")

    assert begins(found, 1) == [1, 2, 4, 5]
    assert begins(found, 0) == [0, 1, 4, 7]  # each backward pass waits for that of the stage behind
    assert found.length == 9
    assert found.bubble == pytest.approx(textbook_bubble(2, 2)) == pytest.approx(1 / 3)


def test_the_gradients_of_weights_fill_what_would_be_idle():
    found = table("F0.0 F0.1 I0.0 W0.0 I0.1 W0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1")

    assert begins(found, 1) == [1, 2, 3, 4, 5, 6]
    assert begins(found, 0) == [0, 1, 3, 4, 5, 6]
    assert found.length == 7
    assert found.bubble == pytest.approx(2 / 14)


def test_stages_of_one_worker_are_parts_of_its_layers():
    found = table("F0.0 F2.0 B2.0 B0.0", "F1.0 F3.0 B3.0 B1.0")

    assert found.length == 6  # four halves forward, four whole ones backward
    assert found.bubble == 0.5


def test_workers_that_wait_for_each_other_are_refused():
    with pytest.raises(ConfigError, match="the workers of this schedule wait for each other in a circle, one before"):
        table("B0.0 F0.0", "F1.0 B1.0")


def test_costs_of_one_s_own_make_the_slowest_stage_set_the_pace():
    orders = [[action(f"F{stage}.{part}") for part in range(3)] for stage in range(2)]
    found = simulate(orders, lambda each: 5.0 if each.stage == 1 else 1.0)

    assert found.length == 16
    assert found.bubble == pytest.approx(1 - 18 / 32)
