"""Checks in some runs of a step whether its losses are sums over rows, and warns once for each step function.

``watch/rows.py`` follows the rows in each replica. This module begins and ends that, and warns of what it finds. Steps
of this package, such as that of ``fit``, ask ``current_row_watch`` themselves and refuse such a loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.registry import RunCount
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.mode import ReplicaRng
from lockstep.strategies.step_names import description_of_step, is_of_the_package
from lockstep.watch.read_numbers import Difference, difference_among
from lockstep.watch.rows import MIXING_ADVICE, Mixing, RowWatch, follows_modules


class RowCheck:
    """The watches of one run's local replicas.

    Args:
        fn: the step function.
        modules: the mirrored modules in use.
        modes: the function mode of each local replica.
        rows: of each local replica's shard, or None.
        count: how often the step function has run, this run included; it learns whether the check saw a loss.

    Attributes:
        mixing: what was found, after the run. The look at a first run tells of it, beside what it finds itself.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[MirroredModule],
        modes: Sequence[ReplicaRng],
        rows: Sequence[int | None],
        *,
        count: RunCount,
    ) -> None:
        self.mixing: Mixing | None = None
        self._fn, self._modules, self._count = fn, modules, count
        through, outputs = follows_modules(count.with_rows), count.row_outputs
        self._watches = [
            None if number < 2 else RowWatch(mode, number, through_modules=through, row_outputs=outputs)
            for mode, number in zip(modes, [number or 0 for number in rows], strict=True)
        ]

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """A block around the run."""
        for module in self._modules:
            module.on_call.append(self._called)
        try:
            yield
        except BaseException:
            self._count.with_rows = 0  # what was refused is looked at again
            raise
        finally:
            for module in self._modules:
                module.on_call.remove(self._called)
            self._modules = ()
        watches = [watch for watch in self._watches if watch is not None]
        is_zero = any(watch.saw_zero for watch in watches)
        self._count.is_open = is_zero and not any(watch.compared for watch in watches)
        self.mixing = next((mixing for watch in watches for mixing in watch.mixings), None)
        told, self._count.has_warned = self._count.has_warned, self._count.has_warned or self.mixing is not None
        if self.mixing is not None and not told and self._count.runs > 1 and not is_of_the_package(self._fn):
            self._warn(self.mixing)
        elif self.mixing is None and not told:
            difference = difference_among([watch.numbers for watch in watches if watch.numbers is not None])
            if difference is not None:
                self._count.has_warned = True
                self._warn_of_numbers(difference)

    def run(self, replica: int, shard: Sequence[Any], body: Callable[[], Any]) -> Any:
        """One replica's part of the run; ``shard`` are the leaves of its shard."""
        watch = self._watches[replica]
        if watch is None:
            return body()
        with watch.watching(shard):
            return body()

    def _called(self, module: MirroredModule, _: Any, __: Any) -> Callable[[Any], None] | None:
        context = get_replica_context()
        watch = None if context is None else self._watches[context.local_replica]
        if watch is None:
            return None
        watch.module_begins()
        return watch.module_ends

    def _warn(self, mixing: Mixing) -> None:
        what = description_of_step(self._fn)
        warnings.warn(f"{what} compares or combines the rows of its shard ({mixing}), {MIXING_ADVICE}", stacklevel=5)

    def _warn_of_numbers(self, difference: Difference) -> None:
        is_of_user = not is_of_the_package(self._fn)
        what = description_of_step(self._fn) if is_of_user else "the model or its loss"
        warnings.warn(
            f"{what} has read numbers from the rows of its shard, by item(), tolist() or NumPy, and computes "
            f"{difference}, where one device has one number for the whole batch; take it from sums over replicas, "
            'ls.get_replica_context().all_reduce("sum", value), or compute it before the batch is distributed',
            stacklevel=5,
        )
