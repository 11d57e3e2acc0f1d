from __future__ import annotations

import pytest

from lockstep.mirroring.optim.update import balance


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([10, 1, 1, 8], 2, ((0,), (1, 2, 3))),
        ([4, 4, 4], 3, ((0,), (1,), (2,))),
        ([5], 3, ((0,), (), ())),
        ([], 2, ((), ())),
        ([3, 2, 1], 1, ((0, 1, 2),)),
    ],
)
def test_items_are_divided_by_size(sizes: list[int], parts: int, expected: tuple[tuple[int, ...], ...]):
    assert balance(sizes, parts) == expected


def test_every_item_is_in_one_part_and_no_part_is_much_larger():
    sizes = [(7 * item) % 50 + 1 for item in range(100)]
    parts = balance(sizes, 4)
    loads = [sum(sizes[item] for item in part) for part in parts]
    assert sorted(item for part in parts for item in part) == list(range(100))
    assert max(loads) - min(loads) <= max(sizes)
