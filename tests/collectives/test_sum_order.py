"""The tree of additions: its shape, and that every division among workers gives the same tree."""

from __future__ import annotations

import itertools

import pytest

from lockstep.collectives.sum_order import Node, add_nodes, nodes_within, tree_sum


def joined(one: str, other: str) -> str:
    return f"({one}{other})"


def by_levels(values: list[str]) -> str:
    """The tree, written down level by level."""
    while len(values) > 1:
        pairs = [joined(*values[at : at + 2]) for at in range(0, len(values) - 1, 2)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


@pytest.mark.parametrize("leaves", range(1, 34))
def test_the_sum_is_level_by_level(leaves: int):
    values = [f"{number} " for number in range(leaves)]
    assert tree_sum(values, joined) == by_levels(values)


@pytest.mark.parametrize("leaves", range(1, 10))
def test_every_division_into_blocks_gives_the_same_additions(leaves: int):
    values = [f"{number} " for number in range(leaves)]

    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, leaves), count) for count in range(leaves)
    ):
        bounds = [0, *cuts, leaves]
        sent = []
        for begin, end in itertools.pairwise(bounds):
            own = add_nodes(((Node(at, at + 1), values[at]) for at in range(begin, end)), leaves, joined)
            assert tuple(node for node, _ in own) == nodes_within(begin, end, leaves)
            sent += own
        assert add_nodes(sent, leaves, joined) == [(Node(0, leaves), by_levels(values))]


@pytest.mark.parametrize(
    ("begin", "end", "leaves", "sizes"),
    [
        (0, 4, 8, [4]),
        (4, 8, 8, [4]),
        (0, 3, 8, [2, 1]),
        (3, 6, 8, [1, 2]),
        (6, 8, 8, [2]),
        (1, 7, 8, [1, 2, 2, 1]),
        (4, 5, 5, [1]),
        (0, 5, 5, [5]),
        (4, 7, 7, [3]),
    ],
)
def test_the_largest_nodes_of_a_block(begin: int, end: int, leaves: int, sizes: list[int]):
    assert [node.end - node.begin for node in nodes_within(begin, end, leaves)] == sizes


def test_a_block_of_many_replicas_has_few_nodes():
    assert all(
        len(nodes_within(begin, end, 200)) <= 2 * 8 for begin, end in itertools.combinations(range(0, 201, 7), 2)
    )
