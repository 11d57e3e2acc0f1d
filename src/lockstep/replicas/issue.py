"""How many replicas of a CPU issue work at once: chosen for each step function by what its first runs measure.

Tiny steps are bound by Python's global lock, and one after another is faster than in parallel; larger ones are not
(8 linear layers of width 64 on 2 cores: two threads 980 us a step, one after another 527; at width 512, 4,724 and
3,983). Every replica keeps its share of the cores either way, so the numbers do not depend on the choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

WARM_UP_RUNS = 2
TIMED_RUNS = 5
SHORT_STEP_S = 0.02
"""Only steps shorter than this, in seconds, are tried one after another: longer ones are not bound by Python."""


class _Trial:
    """The runs of one step function so far: warm-up and timed runs at the widest, then the same at width 1."""

    def __init__(self, widest: int) -> None:
        self.width = widest
        self.settled = widest == 1
        self._seconds: dict[int, list[float]] = {widest: [], 1: []}
        self._widest = widest

    def record(self, seconds: float) -> None:
        """Adds a run at the present width and decides when enough have been seen."""
        if self.settled:
            return
        runs = self._seconds[self.width]
        runs.append(seconds)
        if len(runs) < WARM_UP_RUNS + TIMED_RUNS:
            return
        wide = statistics.median(self._seconds[self._widest][WARM_UP_RUNS:])
        if self.width == self._widest and wide < SHORT_STEP_S:
            self.width = 1
            return
        narrow = self._seconds[1][WARM_UP_RUNS:]
        self.width = 1 if narrow and statistics.median(narrow) < wide else self._widest
        self.settled = True


def code_of(fn: Callable[..., Any]) -> type | CodeType:
    """By what a step function is known again: its code. A lambda or a bound method is a new object at every call."""
    code: type | CodeType = getattr(getattr(fn, "__func__", fn), "__code__", type(fn))
    return code


class IssuePolicy:
    """Decides, per step function, how many replicas of one physical device issue at once.

    Args:
        widest: how many may at most: the cores over a replica's share of them; 1 on a GPU.
    """

    def __init__(self, widest: int) -> None:
        self._widest = widest
        self._trials: WeakKeyDictionary[type | CodeType, _Trial] = WeakKeyDictionary()

    def width(self, fn: Callable[..., Any]) -> int:
        """The width for the next run of ``fn``."""
        return self._trial(fn).width

    def record(self, fn: Callable[..., Any], seconds: float) -> None:
        """Notes that a run of ``fn`` at the width given took ``seconds``."""
        self._trial(fn).record(seconds)

    def _trial(self, fn: Callable[..., Any]) -> _Trial:
        return self._trials.setdefault(code_of(fn), _Trial(self._widest))
