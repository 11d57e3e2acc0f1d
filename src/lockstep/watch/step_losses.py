"""Judges the losses of a step function from its first run on, by what ``backward_check`` reads of them.

first run            the terms of all losses; if an update follows in it, they are judged at once
run with an update   else they are judged here: a loss may be divided by the number of accumulated runs
first uneven batch   they are looked at once more
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction, disable_dispatch_modes, saved_tensors_hooks, tree_leaves
from lockstep.collectives.communicator import call_site
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.watcher import PROCEED, Differentiation, Run, TorchCalled, Watcher
from lockstep.watch.backward_check import Passes, loss_warnings
from lockstep.watch.rows import Mixing
from lockstep.watch.step_names import description_of_step, is_of_the_package, warn_caller


class StepLosses:
    """What has shown of the losses of one step function, from its first run on.

    Attributes:
        cycle: the number of runs whose gradients are accumulated for an update; 0 while it is not known.
        waits: whether an update is waited for, when ``cycle`` shows.
        saw_uneven: whether a run was looked at whose shards have different sizes. Means over equal shards are right if
            they are divided by their number; the first uneven batch shows one that is not.
        calls_collectives: whether the step has called a collective.
        has_warned: whether it was warned of a loss.
        passes, rows: of each local replica, in the run that was looked at.
        mixing: what was found of rows in the first run.
    """

    def __init__(self, run: Run, modules: Sequence[MirroredModule]) -> None:
        # Not the function, which would live as long as the strategy.
        self._step, self.replicas = description_of_step(run.fn), run.strategy.num_replicas_in_sync
        self.is_of_user = run.distributed and not is_of_the_package(run.fn)
        # Weak references: this may wait for an update as long as the step function lives.
        self._modules = [ref(module) for module in modules]
        self.cycle, self.saw_uneven = 0, len(set(run.rows)) > 1
        self.waits = self.calls_collectives = self.has_warned = False
        self.passes: Sequence[Passes] = ()
        self.rows: Sequence[int | None] = ()
        self.mixing: Mixing | None = None

    def accumulates(self) -> bool:
        """Whether gradients wait for an update. Until then each copy has those of its replica."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        # An update takes the gradients of all copies away, so those of other copies show one that has not come.
        parameters = [parameter for module in modules for copy in module.copies[1:] for parameter in copy.parameters()]
        self.waits = any(parameter.grad is not None for parameter in parameters)
        return self.waits

    def warn(self, *, cycle: int) -> None:
        """Warns of the losses that were noted, whose gradients are accumulated over ``cycle`` runs."""
        self.cycle = cycle
        if self.is_of_user:
            for message in loss_warnings(self.passes, self.rows, self.replicas, mixing=self.mixing, cycle=cycle):
                self.has_warned = True
                warn_caller(f"{self._step} {message}")


class LossLook(Watcher):
    """Looks at the losses of a step's first run, or of the first one whose shards have different sizes."""

    def __init__(self, losses: StepLosses, run: Run, modules: Sequence[MirroredModule]) -> None:
        self._losses, self._has_others = losses, len(run.rows) > 1
        self._passes = [Passes() for _ in run.rows]
        self._weights = {id(weight) for module in modules for copy in module.copies for weight in copy.parameters()}
        self._saves_by_hooks = False
        self._is_first = not losses.passes

    def torch_called(self, replica: int) -> TorchCalled | None:
        return partial(self._note_hooks, saved_tensors_hooks(True))

    def _note_hooks(self, hooks: Any, *_: Any) -> Any:
        # What hooks have saved, as gradient checkpointing's, would be computed anew if it were looked at.
        self._saves_by_hooks |= saved_tensors_hooks(True) != hooks
        return PROCEED

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        if not self._has_others:
            return
        passes, inputs = self._passes[replica], differentiation.inputs
        with _unseen():
            if differentiation.returns:
                weights = [leaf for leaf in inputs or () if isinstance(leaf, Tensor)]
                if any(id(weight) in self._weights for weight in weights):
                    passes.differentiates(differentiation.roots, weights, call_site())
            elif inputs is None:
                passes.begins_at(differentiation.roots, saved=not self._saves_by_hooks)

    def collective_called(self, replica: int, name: str, value: Any) -> None:
        if not self._has_others:
            return
        self._passes[replica].calls_collectives = True
        with _unseen():
            for leaf in tree_leaves(value) if name == "all_reduce" else ():
                if isinstance(leaf, Tensor):
                    self._passes[replica].summed(leaf)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        losses = self._losses
        if error is not None:
            return
        for passes in self._passes:
            passes.forget_graphs()
            losses.calls_collectives |= passes.calls_collectives
        losses.passes, losses.rows = self._passes, run.rows
        if self._is_first:
            losses.warn(cycle=0 if losses.accumulates() else 1)
        else:
            losses.mixing = None
            losses.warn(cycle=losses.cycle)


class UpdateWait(Watcher):
    """Waits in later runs for the update that uses the gradients of the first, when its losses can be judged."""

    def __init__(self, losses: StepLosses, runs: int) -> None:
        self._losses, self._runs = losses, runs

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        if error is None and not self._losses.accumulates() and not self._losses.has_warned:
            self._losses.warn(cycle=self._runs)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides from the program's modes what is computed here, and ignores errors, as of tensors freed meanwhile."""
    with suppress(Exception), DisableTorchFunction(), torch.no_grad(), disable_dispatch_modes():
        yield
