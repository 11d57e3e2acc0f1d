"""Which size is tried next, and how far a projection lets the search go; nothing is run."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.strategies.batch_size import Bracket, PeakLine


def tried(bracket: Bracket, largest: int) -> tuple[int, list[int]]:
    """The result and the sizes tried where all up to ``largest`` fit."""
    sizes: list[int] = []
    while (size := bracket.candidate()) is not None:
        sizes.append(size)
        bracket = bracket.after(size, fitted=size <= largest)
    return bracket.result, sizes


def test_sizes_are_doubled_and_then_what_lies_between_is_halved():
    assert tried(Bracket(start=8, multiple_of=4), 50) == (48, [8, 16, 32, 64, 48, 56, 52])


def test_a_start_that_does_not_fit_is_halved():
    assert tried(Bracket(start=64, multiple_of=4), 10) == (8, [64, 32, 16, 8, 12])


@pytest.mark.parametrize("multiple_of", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("start", [1, 5, 64, 1000])
@pytest.mark.parametrize("limit", [None, 100, 333])
def test_the_result_is_the_largest_multiple_that_fits(multiple_of: int, start: int, limit: int | None):
    for largest in [*range(20), 99, 100, 101, 640, 999]:
        result, sizes = tried(Bracket(start=start, multiple_of=multiple_of, limit=limit), largest)

        most = largest if limit is None else min(largest, limit)
        assert result == most - most % multiple_of
        assert len(sizes) == len(set(sizes)) <= 25
        assert all(size % multiple_of == 0 for size in sizes)


def test_no_size_above_the_limit_is_tried():
    assert tried(Bracket(start=8, multiple_of=4, limit=30), 1000) == (28, [8, 16, 28])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0, "multiple_of": 1}, "start=0 is no number of examples; give a whole number of 1 or more"),
        ({"start": 1.5, "multiple_of": 1}, "start=1.5 is no number"),
        ({"start": True, "multiple_of": 1}, "start=True is no number"),
        ({"start": 1, "multiple_of": -2}, "multiple_of=-2 is no number"),
        ({"start": 1, "multiple_of": 1, "limit": 0}, "limit=0 is no number"),
        ({"start": 1, "multiple_of": 4, "limit": 3}, "limit=3 is below multiple_of=4, so no size is left to try"),
    ],
)
def test_numbers_that_are_no_sizes_are_refused(settings: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        Bracket(**settings)


def projected(
    peak_mb: dict[str, float], budget_mb: float, *, start: int = 8, multiple_of: int = 4
) -> tuple[int, list[int]]:
    """The result and the sizes tried where a size of n rows peaks at base + n * row MB, and leaves base."""
    bracket, line, sizes = Bracket(start=start, multiple_of=multiple_of), PeakLine(), []
    while (size := bracket.candidate(line.reach(budget_mb))) is not None:
        sizes.append(size)
        peak = peak_mb["base"] + peak_mb["step"] + size * peak_mb["row"]
        line = line.after(size, peak_mb=peak, resting_mb=peak_mb["base"])
        bracket = bracket.after(size, fitted=peak <= budget_mb)
    return bracket.result, sizes


@pytest.mark.parametrize("row", [0.01, 0.7, 3.0, 20.0])
@pytest.mark.parametrize("step", [0.0, 40.0, 300.0])
@pytest.mark.parametrize("start", [4, 64, 100_000])
def test_no_size_is_run_whose_peak_is_above_the_budget(row: float, step: float, start: int):
    budget = 1100.0
    result, sizes = projected({"base": 100.0, "step": step, "row": row}, budget, start=start)

    room = (budget - 100 - step) / row
    assert sizes[0] == 4  # before anything is known, the smallest
    assert max(sizes) <= room
    assert result >= 0.9 * room - 4
    assert len(sizes) < 25


def test_a_step_that_takes_much_for_no_rows_is_seen_through():
    """4 rows take 304 MB, and there is room for 110 more: in proportion that would be one row, in truth 110."""
    result, sizes = projected({"base": 100.0, "step": 300.0, "row": 1.0}, 514.0)

    assert sizes[:2] == [4, 5]  # a size between two multiples, to see how much of it is the rows'
    assert 100 <= result <= 114


def test_the_smallest_size_may_be_all_that_there_is_room_for():
    assert projected({"base": 100.0, "step": 0.0, "row": 10.0}, 145.0) == (4, [4])


def test_a_smallest_size_above_the_budget_is_the_end():
    assert projected({"base": 100.0, "step": 0.0, "row": 10.0}, 130.0) == (0, [4])


def test_memory_that_grows_faster_than_the_rows_is_taken_at_its_steepest():
    line = PeakLine()
    for rows, peak in [(4, 110.0), (8, 114.0), (16, 154.0)]:
        line = line.after(rows, peak_mb=peak, resting_mb=100.0)

    assert line.reach(154.0 + 5 * 8.5 + 0.05 * 86.5) == 16 + 8


def test_differences_too_small_to_be_measured_do_not_reach_to_infinity():
    line = PeakLine().after(4, peak_mb=100.0, resting_mb=100.0).after(8, peak_mb=100.0, resting_mb=100.0)

    assert line.reach(200.0) == 8 + 4 * 95
