from __future__ import annotations

import pytest

from lockstep.scaling.report import HEIGHT, WIDTH, epoch_bars, speed_up_plot, step_stacks, throughput_bars


def test_bars_are_in_proportion_and_none_is_longer_than_all(make):
    rows = make.result().rows
    bars = throughput_bars(rows)

    assert max(max(bar.percent, bar.ideal_percent) for bar in bars) == pytest.approx(100)
    assert bars[0].percent == bars[0].ideal_percent
    assert bars[2].percent / bars[0].percent == pytest.approx(rows[2].examples_per_s / rows[0].examples_per_s)
    assert bars[2].ideal_percent == pytest.approx(2 * bars[0].percent)
    assert max(bar.percent for bar in epoch_bars(rows)) == pytest.approx(100)


def test_the_pieces_of_a_step_are_its_length(make):
    rows = make.result().rows
    longest = max(row.parts.step for row in rows)

    for row, stack in zip(rows, step_stacks(rows), strict=True):
        assert sum(piece.ms for piece in stack.pieces) == pytest.approx(row.parts.step)
        assert sum(piece.percent for piece in stack.pieces) == pytest.approx(100 * row.parts.step / longest)
        assert sum(piece.share for piece in stack.pieces) == pytest.approx(1)


def test_the_curves_lie_inside_the_drawing_and_rise_with_the_speed_up(make):
    plot = speed_up_plot(make.result().rows)
    ideal, same, times = plot.curves

    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for curve in plot.curves for x, y, _ in curve.points)
    assert [words for _, _, words in ideal.points] == [
        f"what the hardware can give, {n} replicas: {n}.00" for n in (1, 2, 4)
    ]
    for curve in (ideal, same, times):
        heights = [y for _, y, _ in curve.points]
        assert heights == sorted(heights, reverse=True)
    assert len(set(same.path.split())) == 3
    assert [number for _, number in plot.x_ticks] == [1, 2, 4]
    assert [number for _, number in plot.y_ticks] == [0, 1, 2, 3, 4]
