"""Losses are checked in the first steps and in ever fewer of the later ones."""

from __future__ import annotations

from lockstep.watch.check_schedule import is_due


def test_on_a_gpu_the_first_step_alone_is_checked():
    assert [step for step in range(40) if is_due(step, on_cpu=False)] == [1]
    assert [step for step in range(40) if is_due(step)] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
