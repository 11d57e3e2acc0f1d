"""The places of a worker's elements of a tensor in the whole one, as boxes. Pure, on numbers.

whole [2, 12], its columns q0 q1 q2 q3 k0 .. v3          a rank's half: columns q0 q1 k0 k1 v0 v1: three boxes
elements 3 to 11 of a tensor [3, 4] in row-major order    the end of row 0, row 1, the beginning of row 2: three boxes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of a whole tensor, and the place of its elements among those of the worker."""

    offsets: Sizes  # the index of its first element in the whole tensor
    sizes: Sizes  # its lengths
    start: int  # the index, among the worker's elements, at which the contiguous stretch of the box begins
    stretch: Sizes  # the lengths of that stretch
    dim: int = -1  # the dim of the stretch along which the box is a part of it
    column_start: int = 0  # the begin of the box in that dim

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def of(self, local: Tensor) -> Tensor:
        """The box as a view of the worker's elements ``local`` [elements]."""
        stretch = local[self.start : self.start + prod(self.stretch)].view(self.stretch)
        return stretch.narrow(self.dim, self.column_start, self.sizes[self.dim]) if self.stretch else stretch


@dataclass(frozen=True, kw_only=True)
class Region:
    """A worker's part of a tensor."""

    whole: Sizes  # the lengths of the whole tensor
    sizes: Sizes  # the lengths of the part
    offsets: Sizes  # the index of its first element in the whole tensor
    dim: int = -1  # the dim that ``columns`` are along
    columns: Sizes | None = None  # the index of each of its columns in the whole tensor, if they are not consecutive

    def boxes(self, start: int = 0, stop: int | None = None) -> list[Box]:
        """The boxes of the part's elements from ``start`` to before ``stop``, counted in row-major order."""
        total = prod(self.sizes)
        # A tensor of no elements has one box, or no worker would have it in its files.
        if prod(self.whole) == 0:
            return [Box(offsets=self.offsets, sizes=self.sizes, start=0, stretch=self.sizes)]
        boxes, at = [], 0
        for offsets, stretch in _stretches(self.sizes, start, total if stop is None else stop):
            shifted = tuple(map(sum, zip(self.offsets, offsets, strict=True)))
            for column_start, number, length in self._columns(offsets, stretch):
                placed, sizes = self._replaced(shifted, number), self._replaced(stretch, length)
                box = Box(
                    offsets=placed, sizes=sizes, start=at, stretch=stretch, dim=self.dim, column_start=column_start
                )
                boxes.append(box)
            at += prod(stretch)
        return boxes

    def _replaced(self, sizes: Sizes, number: int) -> Sizes:
        """The same lengths or indices, with another one in the dim of the columns."""
        return tuple(number if dim == self.dim % len(sizes) else size for dim, size in enumerate(sizes))

    def _columns(self, offsets: Sizes, stretch: Sizes) -> Iterator[tuple[int, int, int]]:
        """Stretches of consecutive columns: (column in the stretch, column in the whole tensor, length)."""
        if not stretch or self.columns is None:
            yield 0, self.offsets[self.dim] + offsets[self.dim] if stretch else 0, stretch[self.dim] if stretch else 1
            return
        numbers = self.columns[offsets[self.dim] : offsets[self.dim] + stretch[self.dim]]
        begin = 0
        for place in range(1, len(numbers) + 1):
            if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
                yield begin, numbers[begin], place - begin
                begin = place


def whole_region(sizes: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(whole=tuple(sizes), sizes=tuple(sizes), offsets=(0,) * len(sizes))


def _stretches(sizes: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Elements ``start`` to ``stop`` of a tensor as contiguous boxes: their offsets and lengths."""
    if not sizes and start < stop:
        yield (), ()
        return
    inner = prod(sizes[1:])
    while start < stop:
        row, begin = divmod(start, inner)
        # As many whole rows as there are make one box; only the ends of the stretch need boxes of their own
        # (tests/parallel/test_regions.py: test_a_run_is_few_boxes).
        if rows := 0 if begin else (stop - start) // inner:
            yield (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            start += rows * inner
            continue
        end = min(stop - row * inner, inner)
        for offsets, stretch in _stretches(sizes[1:], begin, end):
            yield (row, *offsets), (1, *stretch)
        start = row * inner + end
