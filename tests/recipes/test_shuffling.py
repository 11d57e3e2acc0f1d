from __future__ import annotations

import pytest

from lockstep.recipes.shuffling import seeded_generator, shuffled_order


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
