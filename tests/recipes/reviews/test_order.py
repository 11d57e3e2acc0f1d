from __future__ import annotations

import torch

from lockstep_tools.recipes.reviews.batches import LengthGroupedSampler, ReviewRows

LENGTHS = [3 + n % 17 for n in range(70)]


def orders(*, batch_size: int = 8, window: int = 100) -> list[list[int]]:
    """Of the epochs 0, 1 and 0 again."""
    rows = ReviewRows([[2] * length for length in LENGTHS], [0] * len(LENGTHS))
    order = LengthGroupedSampler(rows, batch_size=batch_size, window=window, seed=3)
    found = []
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        found.append(list(order))
    return found


def test_every_row_comes_once_in_another_order_each_epoch_and_again_the_same():
    first, second, again = orders()
    assert sorted(first) == sorted(second) == list(range(70))
    assert first != second
    assert first == again


def test_batches_hold_rows_of_like_length_and_the_short_one_is_last():
    for batch_size in (8, 9, 32):
        order, _, _ = orders(batch_size=batch_size)
        spans = [{LENGTHS[row] for row in order[n : n + batch_size]} for n in range(0, 70, batch_size)]
        lengths = torch.tensor([float(max(span)) for span in spans])
        assert all(max(span) - min(span) <= batch_size // 4 + 1 for span in spans)
        assert lengths.tolist() != sorted(lengths.tolist())


def test_a_window_of_one_batch_does_not_sort():
    order, _, _ = orders(window=1)
    assert all(max(span) - min(span) > 5 for span in [[LENGTHS[row] for row in order[n : n + 8]] for n in (0, 8, 16)])


def test_the_rows_hear_of_the_epoch():
    rows = ReviewRows([[2, *range(10, 60), 3]], [0], hide=0.5, mask_id=4)
    order = LengthGroupedSampler(rows, batch_size=1, window=1, seed=0)
    before = rows[0]
    order.set_epoch(1)
    assert rows[0] != before
