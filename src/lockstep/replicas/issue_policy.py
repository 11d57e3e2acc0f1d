"""How many replicas of one physical device issue work at once: as many as fill the cores, or one after another.

Short steps on a CPU are bound by Python's global lock, which the replicas' threads hand to each other. Both ways are
timed for each step function, and the faster one stays. Each replica keeps its threads, so the numbers are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.introspection import attribute_of, is_kind

WARM_UP_RUNS = 2
TIMED_RUNS = 5
# Two replicas with 8 linear layers of width 64, on 2 cores: 980 us a step at once, 527 us one after another.
SHORT_STEP_S = 0.02
"""Only steps shorter than this, in seconds, are tried one after another: longer ones are not bound by Python."""


class IssuePolicy:
    """Decides, per step function, how many replicas of one physical device issue at once: ``widest``, or one."""

    def __init__(self, widest: int) -> None:
        self._widest = widest
        # Weakly: the code of a step that the program has dropped, such as a notebook's cell, is not kept alive.
        self._trials: WeakKeyDictionary[type | CodeType, _Trial] = WeakKeyDictionary()

    def width(self, fn: Callable[..., Any]) -> int:
        return self._trial(fn).width

    def record(self, fn: Callable[..., Any], seconds: float) -> None:
        """Notes how long a run of ``fn`` at that width took."""
        self._trial(fn).record(seconds)

    def _trial(self, fn: Callable[..., Any]) -> _Trial:
        code = code_of(fn)
        trial = self._trials.get(code)
        if trial is None:
            trial = self._trials[code] = _Trial(self._widest)
        return trial


class _Trial:
    """The runs of one step function so far: warm-up and timed runs at the largest width, then the same at width 1."""

    def __init__(self, widest: int) -> None:
        self.width = self._widest = widest
        self.is_decided = widest == 1
        self._seconds: dict[int, list[float]] = {widest: [], 1: []}

    def record(self, seconds: float) -> None:
        """Adds a run at the present width and decides when enough have been seen."""
        if self.is_decided:
            return
        runs = self._seconds[self.width]
        runs.append(seconds)
        if len(runs) < WARM_UP_RUNS + TIMED_RUNS:
            return
        # Medians: one run in which the machine was busy with something else must not decide.
        wide = statistics.median(self._seconds[self._widest][WARM_UP_RUNS:])
        if self.width == self._widest and wide < SHORT_STEP_S:
            self.width = 1
            return
        narrow = self._seconds[1][WARM_UP_RUNS:]
        self.width = 1 if narrow and statistics.median(narrow) < wide else self._widest
        self.is_decided = True


def code_of(fn: Callable[..., Any]) -> type | CodeType:
    """The code of a step function, which identifies it: a lambda or bound method is a new object at every call."""
    if type(fn) is FunctionType:  # asked in every run; a function of Python's keeps its code where C reads it
        return fn.__code__
    code: type | CodeType = attribute_of(attribute_of(fn, "__func__", fn), "__code__", type(fn))
    return code


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function under partials, bound methods and decorators."""
    if type(fn) is FunctionType and "__wrapped__" not in fn.__dict__:
        return fn
    passed: dict[int, Any] = {}
    inner: Any = fn
    while inner is not None and id(inner) not in passed:
        fn = passed[id(inner)] = inner
        inner = attribute_of(fn, "__func__", attribute_of(fn, "__wrapped__"))
        if is_kind(fn, partial):
            inner = attribute_of(fn, "func")
    return fn
