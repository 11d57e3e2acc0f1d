"""The search for the largest batch, as pure functions on numbers: which size to try next, and what it would take.

    smallest -> start -> doubled while it fits -> halfway between what fits and what does not -> ... until they meet
                  \\-> halved while it does not fit

A ``Bracket`` knows what has been tried; a ``PeakLine`` what the tried sizes took, and so how far the search may go.
Running a size is ``batch_size``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.errors import ConfigError

_FURTHEST = 16
"""By how many times a size may be above the largest that has been tried, however much memory seems to be left."""
_FINE = 64
"""Where the projected peak ends the search, gains below 1/64 of the size are not worth another trial."""
_NOISE_MB = 1.0
"""Differences of the resident memory below this say nothing."""
_MARGIN = 0.05
"""Part of the memory above the smallest size's peak that a projection leaves free: after many steps the heap has gaps.
MobileNetV2 at 64x64 had 2 to 9% more resident after six steps than in a step that began with a tidy heap."""
_WELL_BELOW = 0.75
"""Part of a size up to which a smaller one tells how memory grows."""


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Between the largest size that fits and the smallest that does not. Sizes are rows of a global batch.

    Args:
        start: the size to begin with.
        multiple_of: what the result is a multiple of.
        limit: the largest size of interest; None is without end.
        fits: the largest size that was tried and fits; 0 before one has.
        fails: the smallest size that was tried and does not fit; None before one has not.

    Raises:
        ConfigError: a number that is no positive whole number, or a limit below ``multiple_of``.
    """

    start: int
    multiple_of: int
    limit: int | None = None
    fits: int = 0
    fails: int | None = None

    def __post_init__(self) -> None:
        for name in ("start", "multiple_of", "limit"):
            value = getattr(self, name)
            if (value is not None or name != "limit") and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} is no number of examples; give a whole number of 1 or more")
        if self.limit is not None and self.limit < self.multiple_of:
            raise ConfigError(
                f"limit={self.limit} is below multiple_of={self.multiple_of}, so no size is left to try; "
                f"raise the limit, or give multiple_of={self.limit} or less"
            )

    @property
    def result(self) -> int:
        """The largest multiple known to fit; 0 is none."""
        return self._multiple(self.fits)

    def after(self, size: int, *, fitted: bool) -> Bracket:
        """The bracket when ``size`` has been tried."""
        return replace(self, fits=size) if fitted else replace(self, fails=size)

    def candidate(self, reach: int | None = None) -> int | None:
        """The size to try next; None when there is none left.

        Args:
            reach: the largest size that is projected to fit, above which nothing is tried; None where nothing is
                projected. It need not be a multiple: a size between two of them may be tried to see further.
        """
        wanted = self._wanted()
        if wanted <= self._multiple(self.fits):
            return None
        if reach is None:
            return wanted
        if not self.fits:  # nothing is known yet, so the least that can be asked for
            return self.multiple_of
        reach = min(reach, _FURTHEST * self.fits)
        return wanted if wanted <= reach else self._towards(reach)

    def _wanted(self) -> int:
        if self.fails is None:
            wanted = max(self.start, 2 * self.fits)
            return max(self._multiple(min(wanted, self.limit or wanted)), self.multiple_of)
        if self.fits:
            return self._multiple((self.fits + self.fails) // 2)
        smallest = self.multiple_of if self.multiple_of < self.fails else 0
        return max(self._multiple(self.fails // 2), smallest)

    def _towards(self, reach: int) -> int | None:
        next_multiple = self._multiple(self.fits) + self.multiple_of
        if reach >= next_multiple:
            reach = self._multiple(reach)
        elif self.fits >= 2 * self.multiple_of:
            return None
        return reach if reach - self.fits >= max(1, self.fits // _FINE) else None

    def _multiple(self, size: int) -> int:
        return size - size % self.multiple_of


@dataclass(frozen=True)
class PeakLine:
    """Peaks of tried sizes, on a line: what is resident anyway, and so much for each row.

    Args:
        points: (rows, MB resident at the peak) of the sizes that ran, by rows.
        resting_mb: resident after the smallest, with what a step leaves for the next, such as optimizer state.
    """

    points: tuple[tuple[int, float], ...] = ()
    resting_mb: float = 0.0

    def after(self, rows: int, *, peak_mb: float, resting_mb: float) -> PeakLine:
        """The line when ``rows`` have been run."""
        resting_mb = self.resting_mb if self.points else resting_mb
        return PeakLine(tuple(sorted([*self.points, (rows, peak_mb)])), resting_mb)

    def reach(self, budget_mb: float) -> int:
        """The largest number of rows whose peak is projected to stay inside the budget; 0 before any has been run.

        After one size its whole peak is taken to grow with the rows, so that the projection is too high rather than too
        low; after two, what they differ by.
        """
        if not self.points:
            return 0
        rows, peak_mb = self.points[-1]
        margin_mb = _MARGIN * max(0.0, budget_mb - self.points[0][1])
        return int(rows + (budget_mb - margin_mb - peak_mb) / self._mb_per_row())

    def _mb_per_row(self) -> float:
        *earlier, (rows, peak_mb) = self.points
        if not earlier:
            return max(_NOISE_MB, peak_mb - self.resting_mb) / rows
        # From the smallest, and from the last that is well below: where memory grows faster than the rows, the steeper
        # counts. Sizes close to each other differ by noise.
        below = [point for point in earlier if point[0] <= _WELL_BELOW * rows] or earlier
        return max(max(_NOISE_MB, peak_mb - other_mb) / (rows - other) for other, other_mb in (below[0], below[-1]))
