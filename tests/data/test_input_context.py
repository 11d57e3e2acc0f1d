from __future__ import annotations

import pytest

from lockstep.data.dataset import InputContext


def test_the_defaults_are_one_of_each():
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)


def test_a_global_batch_is_divided_among_all_replicas():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128) == 32


@pytest.mark.parametrize(
    ("size", "choice"), [(10, "choose 8 or 12"), (2, "choose 4"), (0, "choose 4"), (-4, "choose 4")]
)
def test_a_global_batch_that_does_not_divide_is_refused(size, choice):
    with pytest.raises(ValueError, match=f"global_batch_size={size} does not divide among 4 replicas; {choice}$"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


@pytest.mark.parametrize("bad", [{"num_replicas_in_sync": 0}, {"num_input_pipelines": 0}])
def test_there_is_at_least_one_of_each(bad):
    with pytest.raises(ValueError, match="give at least 1 replica, and an id below num_input_pipelines"):
        InputContext(**bad)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_pipeline_is_one_of_those_there_are(number):
    with pytest.raises(ValueError, match=f"input_pipeline_id={number}, .*and an id below num_input_pipelines"):
        InputContext(num_input_pipelines=2, input_pipeline_id=number)
