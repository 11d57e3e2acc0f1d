"""Checks in some runs of a step whether its losses are sums over rows, and warns once for each step function.

``watch/rows.py`` follows the rows in each replica. This module begins and ends that, and warns of what it finds. Steps
of this package, such as that of ``fit``, ask ``current_row_watch`` themselves and refuse such a loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.registry import RunCount
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.mode import ReplicaRng
from lockstep.strategies.backward_check import Passes, is_mean_of, loss_warnings
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
        self._fn, self._modules, self._count, self._rows = fn, modules, count, rows
        # The losses of this run, if it is not the first, whose look collects them itself. That a step calls collectives
        # is known from the first run: only a profile function sees it.
        calls_collectives = count.look is not None and count.look.calls_collectives
        self._passes = [Passes(calls_collectives=calls_collectives) for _ in rows]
        self._module_states: list[dict[str, Tensor]] = [{} for _ in rows]
        self._watches = [
            self._watch(mode, number or 0, passes, state)
            for mode, number, passes, state in zip(
                modes, rows, self._passes, count.module_states or self._module_states, strict=True
            )
        ]

    def _watch(self, mode: ReplicaRng, rows: int, passes: Passes, state: Mapping[str, Tensor]) -> RowWatch | None:
        # One row cannot be combined with another.
        if rows < 2:
            return None
        looks = self._count.runs > 1 and self._count.look is not None and not is_of_the_package(self._fn)
        return RowWatch(
            mode,
            rows,
            through_modules=follows_modules(self._count.with_rows),
            row_outputs=self._count.row_outputs,
            module_state=state,
            has_read=self._count.has_read,
            is_mean=partial(is_mean_of, rows=rows),
            begins_backward=passes.begins_again_at if looks else lambda _: None,
        )

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """A block around the run. Afterwards it warns of what the watches have found."""
        for module in self._modules:
            module.on_call.append(self._called)
        try:
            yield
        except BaseException:
            # What was refused is looked at again in the next run, though a check is not due then.
            self._count.with_rows = 0
            raise
        finally:
            for module in self._modules:
                module.on_call.remove(self._called)
            self._modules = ()
        watches = [watch for watch in self._watches if watch is not None]
        # A loss of zero has gradients of zero, which are alike however it is computed: the next run is checked instead
        # (tests/watch/test_rows.py: test_a_step_whose_loss_is_zero_leaves_the_check_to_the_next).
        is_zero = any(watch.saw_zero for watch in watches)
        self._count.is_open = is_zero and not any(watch.compared for watch in watches)
        self._count.has_read = any(watch.has_read for watch in watches)
        self._count.module_states = self._module_states if any(self._module_states) else []
        self.mixing = next((mixing for watch in watches for mixing in watch.mixings), None)
        if not self._count.has_warned:
            self._warn_of_what_was_found(watches)

    def _warn_of_what_was_found(self, watches: Sequence[RowWatch]) -> None:
        is_of_user, count = not is_of_the_package(self._fn), self._count
        count.has_warned = self.mixing is not None
        if self.mixing is not None:
            if is_of_user and count.runs > 1:
                self._warn(f"compares or combines the rows of its shard ({self.mixing}), {MIXING_ADVICE}")
            return
        numbers = [watch.numbers for watch in watches if watch.numbers is not None]
        difference = difference_among(numbers, only_in_modules=not is_of_user)
        kink = next((kink for watch in watches for kink in watch.kinks), "") if is_of_user else ""
        messages = [*self._losses(), *([_about_kink(kink)] if kink else [])]
        if difference is not None:
            messages.append(_about_numbers(difference))
        for message in messages:
            count.has_warned = True
            self._warn(message)

    def _losses(self) -> Iterator[str]:
        """Yields the warnings about the losses of a later run, which may have terms that those of the first had not."""
        look = self._count.look
        if look is not None and look.cycle and not look.has_warned and any(passes.losses for passes in self._passes):
            yield from loss_warnings(self._passes, self._rows, look.replicas, mixing=None, cycle=look.cycle)

    def run(self, replica: int, shard: Sequence[Any], body: Callable[[], Any]) -> Any:
        """One replica's part of the run; ``shard`` are the leaves of its shard."""
        watch = self._watches[replica]
        if watch is None:
            return body()
        with watch.watching(shard):
            result = body()
            if watch.through_modules:
                for module in self._modules:
                    self._module_states[replica] |= watch.state_in(module.copies[replica])
            return result

    def _called(self, module: MirroredModule, _: Any, __: Any) -> Callable[[Any], None] | None:
        context = get_replica_context()
        watch = None if context is None else self._watches[context.local_replica]
        if watch is None:
            return None
        watch.module_begins()
        return watch.module_ends

    def _warn(self, what: str) -> None:
        is_of_user = not is_of_the_package(self._fn)
        subject = description_of_step(self._fn) if is_of_user else "the model or its loss"
        warnings.warn(f"{subject} {what}", stacklevel=6)


def _about_numbers(difference: Difference) -> str:
    read = "has read numbers from the rows of its shard, by item(), tolist() or NumPy, and computes"
    return (
        f"{'computes with' if difference.is_kept else read} {difference}, where one device has one number for the "
        'whole batch; take it from sums over replicas, ls.get_replica_context().all_reduce("sum", value), or compute '
        "it before the batch is distributed"
    )


def _about_kink(kink: str) -> str:
    return (
        f"applies a function with a kink, such as clamp or abs, to a sum over the rows of its shard ({kink}), where "
        "one device applies it to the sum over the batch, which may be on the other side of the kink; sum over all "
        'replicas first, with ls.get_replica_context().all_reduce("sum", value), or apply it to the loss of each row'
    )
