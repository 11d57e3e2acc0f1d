"""Checks in some runs of a step whether its losses are sums over rows, and warns once for each step function.

``row_dependence`` follows the rows in each replica. This module begins and ends that, and warns of what it finds. Steps
of this package, such as that of ``fit``, ask ``current_row_watch`` themselves and refuse such a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction
from lockstep.data.structure import distributed_leaves
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.watcher import Differentiation, Run, TorchCalled, Watcher
from lockstep.watch.check_schedule import follows_modules
from lockstep.watch.loss_graph_check import Passes, StepLosses, is_mean_of, loss_warnings
from lockstep.watch.numbers_from_rows import Difference, difference_among
from lockstep.watch.row_dependence import MIXING_ADVICE, Mixing, RowWatch
from lockstep.watch.step_names import description_of_step, is_of_the_package, warn_caller


@dataclass(slots=True)
class RunCount:
    """How often a step function has run since the last of so many modules was mirrored."""

    modules: int
    losses: StepLosses
    runs: int = 0
    with_rows: int = 0  # runs in which a shard had several rows
    row_outputs: dict[int, set[int]] = field(default_factory=dict)  # as ``row_dependence.RowOutputs`` says
    has_warned: bool = False  # of rows that are combined
    has_read: bool = False  # numbers from rows, by Python or NumPy
    module_states: list[dict[str, Tensor]] = field(default_factory=list)  # of each replica: what its modules have kept
    is_open: bool = False  # whether the last check of the losses saw only zeros, so that the next run is checked too


class RowCheck(Watcher):
    """The watches of one run's local replicas.

    Args:
        run: the run.
        modules: the mirrored modules in use.
        modes: the function mode of each local replica.
        count: how often the step function has run, this run included; it learns what the check saw.
    """

    def __init__(
        self, run: Run, modules: Sequence[MirroredModule], modes: Sequence[ReplicaRng], *, count: RunCount
    ) -> None:
        self._fn, self._modules, self._modes, self._count, self._rows = run.fn, modules, modes, count, run.rows
        self._is_of_user = not is_of_the_package(run.fn)
        self._shards = distributed_leaves(run.arguments, len(run.rows))
        # The losses of this run, if it is not the first, whose look collects them itself. That a step calls collectives
        # is known from the first run.
        self._passes = [Passes(calls_collectives=count.losses.calls_collectives) for _ in run.rows]
        self._module_states: list[dict[str, Tensor]] = [{} for _ in run.rows]
        states = count.module_states or self._module_states
        self._watches = [
            self._watch(mode, rows or 0, state) for mode, rows, state in zip(modes, run.rows, states, strict=True)
        ]

    def _watch(self, mode: ReplicaRng, rows: int, state: Mapping[str, Tensor]) -> RowWatch | None:
        # One row cannot be combined with another.
        if rows < 2:
            return None
        return RowWatch(
            mode,
            rows,
            through_modules=follows_modules(self._count.with_rows),
            row_outputs=self._count.row_outputs,
            module_state=state,
            has_read=self._count.has_read,
            is_mean=partial(is_mean_of, rows=rows),
        )

    def run_begins(self, run: Run) -> None:
        for module in self._modules:
            module.on_call.append(self._called)

    @contextmanager
    def in_replica(self, replica: int) -> Iterator[None]:
        watch = self._watches[replica]
        if watch is None:
            yield
            return
        buffers = [buffer for module in self._modules for buffer in module.copies[replica].buffers()]
        with watch.watching(self._shards[replica], buffers):
            yield
            if watch.through_modules:
                for module in self._modules:
                    self._module_states[replica] |= watch.state_in(module.copies[replica])

    def torch_called(self, replica: int) -> TorchCalled | None:
        watch = self._watches[replica]
        return None if watch is None else watch.call

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        looks = self._count.runs > 1 and self._is_of_user and self._watches[replica] is not None
        if looks and not differentiation.returns and differentiation.inputs is None:
            with torch.no_grad(), self._modes[replica].aside(), DisableTorchFunction():  # unseen
                self._passes[replica].begins_again_at(differentiation.roots)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        for module in self._modules:
            module.on_call.remove(self._called)
        if error is not None:
            # What was refused is looked at again in the next run, though a check is not due then.
            self._count.with_rows = 0
            return
        watches = [watch for watch in self._watches if watch is not None]
        # A loss of zero has gradients of zero, which are alike however it is computed: the next run is checked instead
        # (tests/watch/test_row_dependence.py: test_a_step_whose_loss_is_zero_leaves_the_check_to_the_next).
        is_zero = any(watch.saw_zero for watch in watches)
        self._count.is_open = is_zero and not any(watch.compared for watch in watches)
        self._count.has_read = any(watch.has_read for watch in watches)
        self._count.module_states = self._module_states if any(self._module_states) else []
        mixing = next((mixing for watch in watches for mixing in watch.mixings), None)
        if self._count.runs == 1:
            self._count.losses.mixing = mixing
        if not self._count.has_warned:
            self._warn_of_what_was_found(watches, mixing)

    def _warn_of_what_was_found(self, watches: Sequence[RowWatch], mixing: Mixing | None) -> None:
        is_of_user, count = self._is_of_user, self._count
        count.has_warned = mixing is not None
        if mixing is not None:
            if is_of_user and count.runs > 1:
                self._warn(f"compares or combines the rows of its shard ({mixing}), {MIXING_ADVICE}")
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
        losses = self._count.losses
        if losses.cycle and not losses.has_warned and any(passes.losses for passes in self._passes):
            yield from loss_warnings(self._passes, self._rows, losses.replicas, mixing=None, cycle=losses.cycle)

    def _called(self, module: MirroredModule, _: Any, __: Any) -> Callable[[Any], None] | None:
        context = get_replica_context()
        watch = None if context is None else self._watches[context.local_replica]
        if watch is None:
            return None
        watch.module_begins()
        return watch.module_ends

    def _warn(self, what: str) -> None:
        subject = description_of_step(self._fn) if self._is_of_user else "the model or its loss"
        warn_caller(f"{subject} {what}")


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
