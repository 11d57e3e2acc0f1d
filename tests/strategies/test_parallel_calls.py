"""A step of a divided model makes few Python calls of the engine, on workers of both stages."""

from __future__ import annotations

import pytest
from tests.house import calls_of_a_divided_step

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.timeout(300)]

MOST_CALLS = {0: 900, 2: 1_090}
"""By worker: of the first stage and of the last one, which also computes the loss of each microbatch."""


def test_a_step_with_two_stages_and_two_tensor_ranks_makes_few_calls():
    calls = calls_of_a_divided_step()

    for worker, most in MOST_CALLS.items():
        assert sum(calls[worker].values()) <= most, calls[worker].most_common(20)
        assert calls[worker]["parallel/pipeline.py:Pipeline._run"] == 4  # which counts the four microbatches
