"""Which part of an optimizer's state each worker keeps: pure, on numbers of elements.

    parameters in order    |---- 0 ----|-- 1 --|--------- 2 ---------|- 3 -|
    three owners           |       owner 0       |      owner 1      |  owner 2

Each owner has a run of the parameters, all runs of about equal length, so that a parameter is cut where two runs meet
(Rajbhandari et al. 2019, "ZeRO", stage 1). The optimizers that are divided so update each number by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

CUT_AT = 64
"""A parameter is cut at multiples of it: what torch computes as vectors in the whole, it then does in a piece too."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of a parameter's elements, in row-major order.

    Args:
        parameter: its number.
        start: the first.
        stop: the one behind the last.
    """

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start


Shares = tuple[tuple[Piece, ...], ...]
"""The pieces of each owner, in the order of the parameters."""


def divide_state(
    sizes: Sequence[int], owners: int, *, kinds: Sequence[Hashable] | None = None, uncut: Collection[int] = ()
) -> Shares:
    """Divides parameters among owners, evenly for each kind.

    Args:
        sizes: the elements of each parameter.
        owners: how many there are.
        kinds: parameters of one kind are divided by themselves, so that workers who hold the same ones beside others
            cut them at the same places; None is one kind.
        uncut: the numbers of parameters that one owner has whole.

    Example:
        >>> [[(piece.parameter, piece.start, piece.stop) for piece in own] for own in divide_state([256, 128], 2)]
        [[(0, 0, 192)], [(0, 192, 256), (1, 0, 128)]]
    """
    of_kind: dict[Hashable, list[int]] = {}
    for number in range(len(sizes)):
        of_kind.setdefault(None if kinds is None else kinds[number], []).append(number)
    found: list[list[Piece]] = [[] for _ in range(owners)]
    for members in of_kind.values():
        for own, more in zip(found, _divided(members, sizes, owners, uncut), strict=True):
            own += more
    return tuple(tuple(sorted(own, key=lambda piece: piece.parameter)) for own in found)


def window(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """What stands from ``begin`` to ``end`` where an owner's pieces stand one behind the other."""
    at = 0
    for piece in pieces:
        start, stop = max(begin - at, 0), min(end - at, piece.size)
        if start < stop:
            yield Piece(parameter=piece.parameter, start=piece.start + start, stop=piece.start + stop)
        at += piece.size


def _divided(members: Sequence[int], sizes: Sequence[int], owners: int, uncut: Collection[int]) -> list[list[Piece]]:
    total = sum(sizes[number] for number in members)
    found: list[list[Piece]] = [[] for _ in range(owners)]
    before, owner = 0, 0
    for number in members:
        start, size = 0, sizes[number]
        while start < size:
            left = total * (owner + 1) // owners - before - start  # to the end of this owner's run
            stop = size if owner == owners - 1 else start + _whole_steps(left, size - start, cut=number not in uncut)
            if stop > start:
                found[owner].append(Piece(parameter=number, start=start, stop=stop))
            start = stop
            if start < size:
                owner += 1
        before += size
    return found


def _whole_steps(left: int, size: int, *, cut: bool) -> int:
    """How many of the next ``size`` elements an owner takes, whose run ends ``left`` elements from here."""
    if left >= size:
        return size
    if not cut:
        return size if 2 * left >= size else 0
    return min(size, max(0, -(-left // CUT_AT) * CUT_AT))
