from __future__ import annotations

import pytest
import torch

from lockstep_tools.recipes.shuffling import plan_batches, seeded_generator, shuffled_order


def test_generators_differ_for_every_sequence_of_numbers():
    seeds = {seeded_generator(*numbers).initial_seed() for numbers in [(1, 2), (12,), (1, 2, 3), (1, 23), (2, 1)]}
    assert len(seeds) == 5


def test_every_row_leaves_the_shuffle_buffer_once_and_after_it_entered():
    order = shuffled_order(200, buffer=20, generator=seeded_generator(1)).tolist()
    assert sorted(order) == list(range(200))
    assert order != sorted(order)
    assert all(row < position + 20 for position, row in enumerate(order))


@pytest.mark.parametrize("buffer", [0, 200, 5000])
def test_a_buffer_that_holds_all_permutes_all(buffer: int):
    order = shuffled_order(200, buffer=buffer, generator=seeded_generator(1)).tolist()
    assert sorted(order) == list(range(200))
    assert max(abs(row - position) for position, row in enumerate(order)) > 100


def test_windows_sort_rows_by_length_and_batches_come_in_random_order():
    lengths = torch.arange(64)[torch.randperm(64, generator=seeded_generator(0))]
    plan = plan_batches(lengths, batch_size=8, window=8, generator=seeded_generator(1))
    spans = [(int(lengths[rows].min()), int(lengths[rows].max())) for rows in plan]
    assert sorted(spans) == [(low, low + 7) for low in range(0, 64, 8)]
    assert spans != sorted(spans)
    assert any(lengths[rows].tolist() != sorted(lengths[rows].tolist()) for rows in plan)


def test_a_window_of_one_batch_mixes_all_lengths():
    lengths = torch.arange(64)
    plan = plan_batches(lengths, batch_size=8, window=1, generator=seeded_generator(1))
    assert sorted(torch.cat(plan).tolist()) == list(range(64))
    assert all(int(lengths[rows].max() - lengths[rows].min()) > 16 for rows in plan)
