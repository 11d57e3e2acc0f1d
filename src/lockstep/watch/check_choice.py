"""Chooses what looks at a run of a step function.

    first run             FirstRun, PythonDraws, LossLook
    first uneven batch    LossLook; before, UpdateWait until an update has used the first run's gradients
    some runs with rows   RowCheck, as ``check_schedule`` says

Nothing looks at most runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from lockstep._torch_compat import is_profiled
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.registry import MirroredObjects
from lockstep.replicas.issue_policy import code_of, unwrapped
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.watcher import Run, Watcher
from lockstep.watch.check_schedule import is_due
from lockstep.watch.first_run import FirstRun
from lockstep.watch.loss_graph_check import LossLook, StepLosses, UpdateWait
from lockstep.watch.python_draws import PythonDraws
from lockstep.watch.row_check import RowCheck, RunCount
from lockstep.watch.step_names import is_of_the_package


class CheckChoice(Watcher):
    """Counts the runs of the step functions of a strategy with several replicas.

    Args:
        objects: what the strategy has mirrored.
        modes: the function mode of each local replica.
    """

    sees_every_step = False

    def __init__(self, objects: MirroredObjects, modes: Sequence[ReplicaRng]) -> None:
        self._objects, self._modes = objects, modes
        # By code and not by function: a loop that writes its step as a lambda makes another function for each run.
        self._counts: WeakKeyDictionary[type | CodeType, RunCount] = WeakKeyDictionary()
        self._with_rows: WeakSet[type | CodeType] = WeakSet()

    def looks_at(self, run: Run) -> Sequence[Watcher]:
        modules = self._objects.modules
        for module in modules:
            # Watches use hooks, which torch.compile would compile too.
            if module.is_compiled:
                return ()
        count, first = self._count_of(run), run.rows[0]
        count.runs += 1
        has_rows, is_even = False, True
        for rows in run.rows:
            has_rows, is_even = has_rows or (rows or 0) > 1, is_even and rows == first
        count.with_rows += has_rows
        losses = count.losses
        rests = count.runs > 1 and not losses.waits and (is_even or losses.saw_uneven)
        if rests and not self._is_due(run, count):
            return ()
        return tuple(self._chosen(run, count, modules))

    def _count_of(self, run: Run) -> RunCount:
        step, mirrored = _step_of(run.fn), self._objects.num_mirrored
        count = self._counts.get(step)
        if count is None or count.modules != mirrored:
            count = self._counts[step] = RunCount(mirrored, StepLosses(run, self._objects.modules))
        return count

    def _chosen(self, run: Run, count: RunCount, modules: Sequence[MirroredModule]) -> Iterator[Watcher]:
        """Yields what looks at the run. The last ends first, so that the losses are judged with what the rest saw."""
        losses = count.losses
        if count.runs == 1:
            yield LossLook(losses, run, modules)
            yield PythonDraws(run, self._modes)
        elif losses.waits:
            yield UpdateWait(losses, count.runs)
        elif not losses.saw_uneven and len(set(run.rows)) > 1:
            losses.saw_uneven = True
            if losses.cycle and not losses.has_warned:
                yield LossLook(losses, run, modules)
        if self._is_due(run, count) and self._checks_rows(run, modules):
            yield RowCheck(run, modules, self._modes, count=count)
        if count.runs == 1:
            yield FirstRun(run, modules)

    @staticmethod
    def _is_due(run: Run, count: RunCount) -> bool:
        on_cpu = run.strategy.devices[0].kind == "CPU"
        return run.distributed and (is_due(count.with_rows, on_cpu=on_cpu) or (count.is_open and on_cpu))

    def _checks_rows(self, run: Run, modules: Sequence[MirroredModule]) -> bool:
        """Whether the rows of the shards are followed where it is due: in the user's steps, and in those of fit.

        Not in a run that is profiled, which would show work that other runs do not do.
        """
        # A part's operators work on DTensors, whose rows the watch does not follow.
        if is_profiled() or any(module.is_part or module.shards_weights for module in modules):
            return False
        return not is_of_the_package(run.fn) or _step_of(run.fn) in self._with_rows

    def check_rows_in(self, fn: Callable[..., Any]) -> None:
        """Follows the rows of ``fn``, a step function of this package, in some runs. The step asks for the result."""
        self._with_rows.add(_step_of(fn))

    def begin_training(self, fn: Callable[..., Any]) -> None:
        """Begins to count the runs of ``fn`` with rows anew, and follows its rows in some of them."""
        self.check_rows_in(fn)
        if (count := self._counts.get(_step_of(fn))) is not None:
            count.with_rows, count.is_open = 0, False

    def has_checked_rows_in(self, fn: Callable[..., Any]) -> bool:
        """Whether rows have been followed through ``fn`` since the last module was mirrored."""
        count = self._counts.get(_step_of(fn))
        return count is not None and count.modules == self._objects.num_mirrored and count.with_rows > 0


def _step_of(fn: Callable[..., Any]) -> type | CodeType:
    """What tells a step function from others, and is the same for each object that a loop makes anew of it."""
    return code_of(unwrapped(fn))
