r"""The one order in which values of replicas are added: a balanced binary tree over the replicas' numbers.

    replica  0   1   2   3   4        A node is a run of replicas. Every layout of the replicas on workers and devices
              \ /     \ /    |        adds the same pairs, so the sum has the same bits on all layouts. A worker adds
              0-1     2-3    |        the nodes that lie within its own replicas, and sends these; where its replicas
                 \   /       |        are a node, that is one value.
                  0-3       /
                     \     /
                      0-4

Pairs are added level by level, from the left; what is left over at the end of a level goes up to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The replicas from ``begin`` to before ``end``, whose values are added before any other is."""

    begin: int
    end: int


def add_nodes(parts: Iterable[tuple[Node, T]], leaves: int, add: Callable[[T, T], T]) -> list[tuple[Node, T]]:
    """Adds up consecutive nodes as far as the tree over ``leaves`` replicas has nodes for them.

    Args:
        parts: nodes of the tree and their values, in the order of the replicas; there may be gaps.
        leaves: the number of replicas.
        add: returns the sum of two values; it may reuse the memory of the first.

    Returns:
        The largest nodes, in the order of the replicas. It is one if the parts are all replicas.
    """
    nodes: list[tuple[Node, T]] = []
    for node, value in parts:
        # As a carry in binary addition: a node that completes a pair may complete the next larger one.
        while nodes and (above := _parent(nodes[-1][0], node, leaves)):
            value = add(nodes.pop()[1], value)
            node = above
        nodes.append((node, value))
    return nodes


def nodes_within(begin: int, end: int, leaves: int) -> tuple[Node, ...]:
    """The largest nodes of the tree over ``leaves`` replicas that lie in ``begin`` to before ``end``.

    There are at most two of each size.

    Example:
        >>> [tuple(node) for node in nodes_within(3, 8, 8)]
        [(3, 4), (4, 8)]
    """
    return tuple(node for node, _ in add_nodes(leaf_nodes(range(begin, end)), leaves, lambda one, _: one))


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of one value of each replica.

    Example:
        >>> tree_sum(["a", "b", "c", "d", "e"], lambda one, other: f"({one}{other})")
        '(((ab)(cd))e)'
    """
    if len(values) == 1:
        return values[0]
    ((_, total),) = sums_within(values, 0, len(values), add)
    return total


def sums_within(values: Sequence[T], first: int, leaves: int, add: Callable[[T, T], T]) -> list[tuple[Node, T]]:
    """The sums of the largest nodes within consecutive replicas, given a value of each from replica ``first`` on."""
    parts = ((node, values[replica - first]) for node, replica in leaf_nodes(range(first, first + len(values))))
    return add_nodes(parts, leaves, add)


def leaf_nodes(replicas: Iterable[int]) -> Iterator[tuple[Node, int]]:
    """The leaves of these replicas, each with the replica's number as its value."""
    for replica in replicas:
        yield Node(replica, replica + 1), replica


def _parent(first: Node, second: Node, leaves: int) -> Node | None:
    """The node of which these are the two children, in this order; None if there is none."""
    size = first.end - first.begin  # a power of two: only the last node of a level has fewer replicas
    are_children = first.begin % (2 * size) == 0 and second == (first.end, min(first.begin + 2 * size, leaves))
    return Node(first.begin, second.end) if are_children else None
