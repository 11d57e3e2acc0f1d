"""Where the gradients of one optimizer are: each replica's own, summed, given to a step, or lost.

    OWN --sum_gradients()-> SUMMED --step()-> OWN        backward -> .grad is read in the step -> [barrier: sum]
     |--end of a run------> KEPT   --step()-> OWN        -> every replica is given the sum, in memory of its own
     `--failed run--------> LOST   --zero_grad()-> OWN   -> clipped or logged -> step() uses replica 0's

A backward pass after such a read adds to replica 0's sums, and in the other replicas to nothing, so that every gradient
counts once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch

from lockstep._torch_compat import DisableTorchFunction
from lockstep.collectives.reduce import mark_summed
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.exchange import Copies
from lockstep.replicas.context import ReplicaContext

Marks = list[tuple[int, int]]
"""The gradients that replicas have, and their versions: equal as long as nobody changes them."""


class Stage(enum.Enum):
    """Where the gradients are, for all replicas together."""

    OWN = enum.auto()
    """Each replica has its own gradients, or none; the step sums them."""
    KEPT = enum.auto()
    """The first replica has the sums of earlier runs; the step adds to them what replicas have since."""
    SUMMED = enum.auto()
    """The first replica has the sums, which the next step uses as they are."""
    LOST = enum.auto()
    """A failed run has spoiled the sums of several runs; only ``zero_grad`` is allowed."""


class GradientState:
    """The state of one optimizer's gradients.

    Attributes:
        stage: where the gradients are.
        given: by local replica, whether its gradients are the sums now, because its step has read them.
        sums_after_runs: whether gradients that a run leaves are summed after it.
    """

    def __init__(self, parameters: Sequence[Copies], *, keeps_sums: bool) -> None:
        self._parameters = parameters
        self._keeps_sums = keeps_sums
        self.sums_after_runs = True
        self.stage = Stage.OWN
        replicas = len(parameters[0]) if parameters else 0
        self.given = [False] * replicas
        self._index = [{id(copies[replica]): at for at, copies in enumerate(parameters)} for replica in range(replicas)]
        # By replica, the numbers of the parameters whose ".grad" is a sum that it was given, and not its own.
        self._sums: list[set[int]] = [set() for _ in range(replicas)]
        self._is_hooked = False
        self._unsynced: set[object] = set()
        self._was_unsynced = False
        self._left: Marks | None = None

    def check_not_lost(self) -> None:
        """Raises a UsageError if a failed run has spoiled the gradients."""
        if self.stage is Stage.LOST:
            raise UsageError(
                "a run failed while gradients of several runs were being added up, and they are lost; call "
                "optimizer.zero_grad() and begin the accumulation again"
            )

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """A ``no_sync`` block, of one replica or of all."""
        block = object()
        self._unsynced.add(block)
        self._was_unsynced = True
        try:
            yield
        finally:
            self._unsynced.discard(block)

    def wants_sum_after_run(self) -> bool:
        """After a run of the only worker: whether replicas have gradients of their own to be summed now."""
        unsynced, self._was_unsynced = self._was_unsynced, bool(self._unsynced)
        if unsynced or not self._may_sum_after_run() or all(self.given):
            return False
        return any(copy.grad is not None for copies in self._parameters for copy in copies[1:])

    def _may_sum_after_run(self) -> bool:
        return self.sums_after_runs and self.stage in (Stage.OWN, Stage.KEPT)

    def marks(self) -> Marks | None:
        """Marks that differ after a run that has changed gradients; None if there are no gradients."""
        if self.stage in (Stage.OWN, Stage.LOST) and all(copies[-1].grad is None for copies in self._parameters):
            return None
        gradients = [parameter.grad for copies in self._parameters for parameter in copies]
        return [(id(each), each._version) for each in gradients if each is not None]

    def note_left(self) -> None:
        """After a run with several workers: notes which gradients this worker's replicas have."""
        self._left = None if not self._may_sum_after_run() or any(self.given[:1]) else self.marks()

    def check_left(self) -> None:
        """Before the next run: raises a UsageError if the gradients of the last one were changed and not cleared."""
        left, self._left = self._left, None
        if left is None or self.marks() in (left, None):
            return
        gradients = [each.grad for copies in self._parameters for each in copies if each.grad is not None]
        if any(bool(each.count_nonzero()) for each in gradients):
            raise UsageError(
                "gradients were changed outside replicas after a run, where they are this worker's own; call "
                "optimizer.sum_gradients() on every worker before they are read or changed, or optimizer.zero_grad()"
            )

    def clear(self, replica: int | None, *, set_to_none: bool = True) -> None:
        """Clears the gradients of a local replica; None is all of them."""
        with DisableTorchFunction():  # otherwise the replica's function mode sees every access to ".grad"
            for copies in self._parameters:
                for parameter in copies if replica is None else (copies[replica],):
                    gradient = parameter.grad
                    if set_to_none or gradient is None:
                        parameter.grad = None
                    else:  # in place, as torch's does
                        if gradient.grad_fn is not None:
                            gradient.detach_()
                        else:
                            gradient.requires_grad_(False)
                        gradient.zero_()
        for each in range(len(self.given)) if replica is None else (replica,):
            self._forget(each)
        self.stage = Stage.OWN

    def run_failed(self, before: Marks | None) -> None:
        """After a failed run: clears the gradients that replicas have added since ``marks`` was ``before``."""
        if before is None or self.marks() != before:
            self.clear(None)
            self.stage = Stage.OWN if before is None else Stage.LOST

    def give(self, context: ReplicaContext) -> None:
        """Gives each replica its own copy of the sums, which the first has. Every replica must call it."""
        replica = context.local_replica
        if not self._is_hooked:
            context.meet("watch of the gradients", None, lambda _: self._hook())
        if replica:
            for copies in self._parameters:
                total = copies[0].grad
                copies[replica].grad = None if total is None else total.to(copies[replica].device, copy=True)
        context.meet("sums of gradients", None, lambda _: None)  # the first replica may change its own from here on
        if context.num_replicas_in_sync > 1:
            for copies in self._parameters:
                if (gradient := copies[replica].grad) is not None:
                    mark_summed(gradient)
        if replica or not self._keeps_sums:
            self._sums[replica] = {at for at, copies in enumerate(self._parameters) if copies[replica].grad is not None}
        self.given[replica] = True

    def take_back(self, replica: int, *, all_but_first: bool = False) -> None:
        """Drops what a replica was given, so that its gradients are its own; but not the first one's, if asked."""
        if replica or not all_but_first:
            with DisableTorchFunction():  # the step guard would take it for an assignment by the step
                for at in self._sums[replica]:
                    self._parameters[at][replica].grad = None
        self._forget(replica)

    def assigned(self, context: ReplicaContext, parameter: Any, value: Any) -> None:
        """The step of the calling replica assigns a parameter's ".grad"."""
        replica = context.local_replica
        if value is None:
            self.given[replica] = False
        if not self.given[replica]:
            self._sums[replica].discard(self._index[replica].get(id(parameter), -1))

    def _forget(self, replica: int) -> None:
        self.given[replica] = False
        self._sums[replica].clear()

    def _hook(self) -> None:
        for at, copies in enumerate(self._parameters):
            for replica, copy in enumerate(copies):
                if copy.requires_grad and copy.is_leaf:
                    copy.register_hook(EngineHook(self._accumulating, replica, at))  # type: ignore[no-untyped-call]
        self._is_hooked = True

    def _accumulating(self, replica: int, at: int) -> None:
        """A backward pass brings a gradient: what a replica was given is no part of it."""
        self.given[replica] = False
        if at in self._sums[replica]:
            self._sums[replica].discard(at)
            with DisableTorchFunction():
                self._parameters[at][replica].grad = None


class EngineHook:
    """A hook of this package on a parameter. It holds a bound method weakly, so as not to keep the strategy alive."""

    def __init__(self, call: Callable[..., None], *args: Any) -> None:
        self._call: Callable[[], Any] = WeakMethod(call) if isinstance(call, MethodType) else lambda: call
        self._args = args

    def __call__(self, _: torch.Tensor) -> None:
        call = self._call()
        if call is not None:
            call(*self._args)
