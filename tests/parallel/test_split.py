"""Which layers each stage holds, and how pipelines run: pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.microbatches import choose_pipelining
from lockstep.parallel.split import check_split, split_layers


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
    costs, stages, before, after = [3.0, 1.0, 2.0, 2.0, 1.0, 4.0, 1.0], 3, 1.0, 2.5

    def slowest(split: Sequence[int]) -> float:
        ends = [sum(split[:stage]) for stage in range(len(split) + 1)]
        sums = [sum(costs[begin:end]) for begin, end in pairwise(ends)]
        return max([sums[0] + before, *sums[1:-1], sums[-1] + after])

    every = [split for split in product(range(1, 8), repeat=stages) if sum(split) == len(costs)]

    assert slowest(split_layers(costs, stages, before=before, after=after)) == min(map(slowest, every))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="pipeline=4 is more stages than the model has layers, 2; choose 1, 2"):
        split_layers([1.0, 1.0], 4)


@pytest.mark.parametrize("given", [(2, 2, 2), (4, 1), (6, 0)])
def test_a_split_of_one_s_own_must_fit(given: tuple[int, ...]):
    assert check_split([2, 4], 2, 6) == (2, 4)

    with pytest.raises(ConfigError, match="does not divide 6 layers into 2 stages; give 2 numbers from 1 that add up"):
        check_split(given, 2, 6)


def test_without_a_number_there_are_two_microbatches_for_every_stage():
    assert choose_pipelining("1f1b", None, 4).microbatches == 8
    assert choose_pipelining("gpipe", None, 1).microbatches == 1
    assert choose_pipelining("gpipe", 5, 4).microbatches == 5


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="microbatches=2 leave some of 4 stages idle all the time; give at least 4"):
        choose_pipelining("1f1b", 2, 4)
    with pytest.raises(ConfigError, match="schedule='zero' is unknown, or does not work yet; choose 1f1b or gpipe"):
        choose_pipelining("zero", None, 2)  # type: ignore[arg-type]
