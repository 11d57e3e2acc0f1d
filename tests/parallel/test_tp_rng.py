"""The switch between a tensor rank's own draws and those of all ranks, on a generator that is a seed and a place."""

from __future__ import annotations

from typing import Any, cast

import torch

from lockstep.parallel.tp_rng import DeviceRng


class Philox:
    """What the switch uses of a GPU's generator; the CPU's has no place that could be set."""

    def __init__(self, seed: int) -> None:
        self.seed, self.place = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def manual_seed(self, seed: int) -> None:
        self.seed, self.place = seed % 2**64, 0

    def get_offset(self) -> int:
        return self.place

    def set_offset(self, place: int) -> None:
        self.place = place

    def draw(self) -> tuple[int, int]:
        self.place += 4
        return self.seed, self.place


def rank(number: int, seed: int = 11) -> tuple[Philox, DeviceRng]:
    generator = Philox(seed)
    return generator, DeviceRng(lambda: cast(torch.Generator, cast(Any, generator)), number)


def a_layer(generator: Philox, draws: DeviceRng) -> dict[str, tuple[int, int]]:
    found = {"before": generator.draw()}
    with draws.switched(of_rank=True):
        found["own"] = generator.draw()
        with draws.switched(of_rank=True):
            found["nested"] = generator.draw()
        with draws.switched(of_rank=False):
            found["together"] = generator.draw()
        found["own again"] = generator.draw()
    found["after"] = generator.draw()
    return found


def test_ranks_draw_alike_outside_and_their_own_inside():
    first, second = (a_layer(*rank(number)) for number in (0, 1))

    for place in ("before", "together", "after"):
        assert first[place] == second[place]
        assert first[place][0] == 11
    for place in ("own", "nested", "own again"):
        assert len({11, first[place][0], second[place][0]}) == 3
    assert first["own"][0] == first["nested"][0] == first["own again"][0]


def test_no_place_is_drawn_from_twice():
    generator, draws = rank(0)
    places = [place for _, place in a_layer(generator, draws).values()]

    assert places == sorted(set(places))
    assert (generator.seed, generator.place) == (11, places[-1])


def test_what_sets_the_place_back_repeats_both_kinds_of_draws():
    generator, draws = rank(1)
    first = a_layer(generator, draws)
    generator.set_offset(0)

    assert a_layer(generator, draws) == first


def test_the_replica_s_seed_is_back_after_an_error():
    generator, draws = rank(0)
    try:
        with draws.switched(of_rank=True):
            raise ValueError
    except ValueError:
        pass

    assert generator.seed == 11
    with draws.switched(of_rank=True):
        assert generator.seed != 11
