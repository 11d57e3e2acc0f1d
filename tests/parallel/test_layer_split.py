"""Which layers each stage holds: pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.layer_split import check_layers, check_split, split_layers
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipeline_config


@pytest.mark.parametrize(
    ("costs", "stages", "after", "expected"),
    [
        ([1.0] * 12, 4, 0.0, (3, 3, 3, 3)),
        ([1.0] * 8, 4, 1.5, (2, 2, 3, 1)),  # the head weighs one and a half layers
        ([1.0] * 2, 2, 9.0, (1, 1)),
        ([4.0, 1.0, 1.0, 1.0, 1.0], 2, 0.0, (1, 4)),
        ([1.0] * 5, 1, 3.0, (5,)),
    ],
)
def test_stages_cost_about_the_same(costs: Sequence[float], stages: int, after: float, expected: tuple[int, ...]):
    assert split_layers(costs, stages, after=after) == expected


def test_no_split_has_a_faster_slowest_stage():
    costs, stages, after = [4.0, 1.0, 2.0, 2.0, 1.0, 4.0, 1.0], 3, 2.5

    def slowest(split: Sequence[int]) -> float:
        ends = [sum(split[:stage]) for stage in range(len(split) + 1)]
        sums = [sum(costs[begin:end]) for begin, end in pairwise(ends)]
        return max([*sums[:-1], sums[-1] + after])

    every = [split for split in product(range(1, 8), repeat=stages) if sum(split) == len(costs)]

    assert slowest(split_layers(costs, stages, after=after)) == min(map(slowest, every))


@pytest.mark.parametrize("given", [(2, 2, 2), (4, 1), (6, 0)])
def test_a_split_of_one_s_own_must_fit(given: tuple[int, ...]):
    assert check_split([2, 4], 2, 6) == (2, 4)

    with pytest.raises(ConfigError, match="6 layers into 2 stages"):
        check_split(given, 2, 6)


@pytest.mark.parametrize(
    ("schedule", "workers", "each", "layers", "fits"),
    [
        ("1f1b", 4, 1, 2, "choose pipeline up to 2"),
        ("interleaved", 4, 2, 6, "choose pipeline up to 3"),
        ("zero_bubble_v", 3, 2, 5, "choose pipeline up to 2"),
    ],
)
def test_more_stages_than_layers_are_refused_with_what_fits(
    schedule: ScheduleName, workers: int, each: int, layers: int, fits: str
):
    pipelining = choose_pipeline_config(schedule, None, workers, each)
    check_layers(pipelining, workers * each)

    with pytest.raises(ConfigError, match=f"{workers * each} stages, and the model has {layers} layers; {fits}"):
        check_layers(pipelining, layers)
