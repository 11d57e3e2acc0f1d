"""What ``tests/house.py`` counts of a running step stays within its limits; tests/test_architecture.py holds names."""

from __future__ import annotations

import pytest
from tests.house import calls_of_a_step, frames_from_fit_to_forward

MOST_CALLS = 500
MOST_FRAMES = 12


@pytest.mark.usefixtures("fresh_devices")
def test_a_small_step_on_two_replicas_makes_few_calls():
    calls = calls_of_a_step()

    assert sum(calls.values()) <= MOST_CALLS, calls.most_common(20)


@pytest.mark.usefixtures("fresh_devices")
def test_few_frames_are_between_fit_and_forward_on_two_replicas():
    assert frames_from_fit_to_forward() <= MOST_FRAMES
