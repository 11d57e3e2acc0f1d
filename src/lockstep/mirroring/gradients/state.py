"""Where the gradients of some parameters are, those of one optimizer or of parameters without one: a state machine.

    NONE         no gradients                                  FINAL_SUM  the same, and the next step adds nothing
    REPLICAS     each replica has its own                      SHOWN      each replica has the sum: its step read it
    PARTIAL_SUM  replica 0 has the sum of what earlier runs    LOST       a failed run has spoiled the sum of several
                 left, the replicas what came since                       runs; all but zero_grad() is refused

                     NONE         REPLICAS     PARTIAL_SUM  FINAL_SUM    SHOWN        LOST
    pass in no_sync  REPLICAS     REPLICAS     PARTIAL_SUM  FINAL_SUM*   REPLICAS     LOST
    run with a pass  PARTIAL_SUM  PARTIAL_SUM  PARTIAL_SUM  FINAL_SUM*   PARTIAL_SUM  LOST
    run that fails   NONE         LOST         LOST         LOST         LOST         LOST
    run without one  NONE         PARTIAL_SUM  PARTIAL_SUM  FINAL_SUM    SHOWN        LOST
    read in a step   SHOWN        SHOWN        SHOWN        SHOWN        SHOWN        refused
    sum_gradients    FINAL_SUM    FINAL_SUM    FINAL_SUM    FINAL_SUM    FINAL_SUM    refused
    step             NONE         REPLICAS     REPLICAS     REPLICAS     REPLICAS     refused
    update (fit)     NONE         NONE         NONE         NONE         NONE         refused
    zero_grad        NONE         NONE         NONE         NONE         NONE         NONE
    add_param_group  NONE         REPLICAS     PARTIAL_SUM  FINAL_SUM    PARTIAL_SUM  LOST

``GradientState.home`` has four of these states. NONE is REPLICAS with every ``.grad`` None, and SHOWN is any of them
while ``has_sums`` is true for every replica. A step after ``*`` is refused. This is the table of one worker with
several replicas; with several workers the end of a run sums nothing, since all workers would have to wait for it.
``tests/mirroring/test_gradient_transitions.py`` tests each entry. A backward pass after a read adds to replica 0's
sums, and in the other replicas takes the place of the copies, so that every gradient counts once.
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
from lockstep.mirroring.gradients.local_sum import Copies, has_gradients
from lockstep.replicas.context import ReplicaContext, get_replica_context

Versions = list[tuple[int, int]]
"""The gradients that replicas have, and their versions: equal as long as nobody changes them."""


class GradientHome(enum.IntEnum):
    """Where the gradients are, for all replicas together. The later member stands for parameters of both."""

    REPLICAS = enum.auto()
    """Each replica has its own gradients, or none; the step sums them."""
    PARTIAL_SUM = enum.auto()
    """The first replica has the sums of earlier runs; the step adds to them what replicas have since."""
    FINAL_SUM = enum.auto()
    """The first replica has the sums, which the next step uses as they are."""
    LOST = enum.auto()
    """A failed run has spoiled the sums of several runs; only ``zero_grad`` is allowed."""


class GradientState:
    """The state of one optimizer's gradients.

    Attributes:
        home: where the gradients are.
        has_sums: by local replica, whether its gradients are the sums now, because its step has read them.
        sums_after_runs: whether gradients that a run leaves are summed after it.
    """

    def __init__(self, parameters: Sequence[Copies], *, keeps_sums: bool) -> None:
        self._parameters = parameters
        self._keeps_sums = keeps_sums
        self.sums_after_runs = True
        self.home = GradientHome.REPLICAS
        replicas = len(parameters[0]) if parameters else 0
        self.has_sums = [False] * replicas
        self._index = [{id(copies[replica]): at for at, copies in enumerate(parameters)} for replica in range(replicas)]
        # By replica, the numbers of the parameters whose ".grad" is a sum that it was given, and not its own.
        self._sums: list[set[int]] = [set() for _ in range(replicas)]
        self._is_hooked = False
        # Blocks and not a counter: replicas enter and leave theirs at the same time, and += is no single operation.
        self._unsynced: set[object] = set()
        self._was_unsynced = False
        self._versions_after_run: Versions | None = None

    def check_not_lost(self) -> None:
        """Raises a UsageError if a failed run has spoiled the gradients."""
        if self.home is GradientHome.LOST:
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
            if get_replica_context() is None:  # around runs; in one, its end has to know of the block
                self._was_unsynced = bool(self._unsynced)

    def wants_sum_after_run(self) -> bool:
        """After a run of the only worker: whether replicas have gradients of their own to be summed now."""
        unsynced, self._was_unsynced = self._was_unsynced, bool(self._unsynced)
        if unsynced or not self._may_sum_after_run() or all(self.has_sums):
            return False
        return has_gradients(self._parameters, slice(1, None))

    def _may_sum_after_run(self) -> bool:
        return self.sums_after_runs and self.home in (GradientHome.REPLICAS, GradientHome.PARTIAL_SUM)

    def versions(self) -> Versions | None:
        """Versions that differ after a run that has changed gradients; None if there are no gradients."""
        # The last replica has no sums: without a gradient there nobody has had a pass. This is asked before every run.
        has_no_sum = self.home in (GradientHome.REPLICAS, GradientHome.LOST)
        if has_no_sum and not has_gradients(self._parameters, slice(-1, None)):
            return None
        gradients = [parameter.grad for copies in self._parameters for parameter in copies]
        return [(id(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def note_left(self) -> None:
        """After a run with several workers: notes which gradients this worker's replicas have."""
        self._versions_after_run = None if not self._may_sum_after_run() or any(self.has_sums[:1]) else self.versions()

    def check_left(self) -> None:
        """Before the next run: raises a UsageError if the gradients of the last one were changed and not cleared."""
        versions, self._versions_after_run = self._versions_after_run, None
        if versions is None or self.versions() in (versions, None):
            return
        gradients = [copy.grad for copies in self._parameters for copy in copies if copy.grad is not None]
        if any(bool(gradient.count_nonzero()) for gradient in gradients):
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
        for number in range(len(self.has_sums)) if replica is None else (replica,):
            self._forget(number)
        self.home = GradientHome.REPLICAS

    def run_failed(self, before: Versions | None) -> None:
        """After a failed run: clears the gradients that replicas have added since ``versions`` was ``before``."""
        # It stays lost where the run failed because it was lost, or before its step: the program may go on after both.
        is_lost = self.home is GradientHome.LOST
        if before is None or self.versions() != before:
            self.clear(None)
            self.home = GradientHome.LOST if is_lost or before is not None else GradientHome.REPLICAS

    def give(self, context: ReplicaContext) -> None:
        """Gives each replica its own copy of the sums, which the first has. Every replica must call it."""
        replica = context.local_replica
        # Hooks only from here on: most programs read no gradients, and a hook is called for each of them in each pass.
        if not self._is_hooked:
            context.meet("watch of the gradients", None, lambda _: self._hook())
        if replica:
            for copies in self._parameters:
                total = copies[0].grad
                copies[replica].grad = None if total is None else total.to(copies[replica].device, copy=True)
        context.meet("sums of gradients", None, lambda _: None)  # the first replica may change its own from here on
        # A program for torch's DDP may add them up itself by all_reduce, N times too much; it is told of it.
        if context.num_replicas_in_sync > 1:
            for copies in self._parameters:
                if (gradient := copies[replica].grad) is not None:
                    mark_summed(gradient)
        # The chief's first replica keeps the sums as its own: what is added up once, of all workers, starts with them.
        if replica or not self._keeps_sums:
            self._sums[replica] = {at for at, copies in enumerate(self._parameters) if copies[replica].grad is not None}
        self.has_sums[replica] = True

    def all_have_sums(self, context: ReplicaContext) -> bool:
        """Whether the gradients of all local replicas are the sums that steps have read. Every replica must call it."""
        # A backward pass after the read may come in some replicas only: these alone have gradients that are no sums.
        if not self._is_hooked:
            return False
        have: bool = context.meet("gradients that the step has read", self.has_sums[context.local_replica], all)
        return have

    def check_final(self, replica: int | None) -> None:
        """Raises a UsageError if a local replica, or any but the first, has gradients beside the final sums."""
        replicas = slice(1, None) if replica is None else slice(max(replica, 1), replica + 1)
        with DisableTorchFunction():  # otherwise a read of ".grad" in a replica asks for the sums
            added = has_gradients(self._parameters, replicas)
        if added:
            raise UsageError(
                "gradients were added after sum_gradients; call it when all are there, and step() or zero_grad() "
                "before the next backward pass"
            )

    def continue_from(self, former: GradientState) -> None:
        """Goes on where another state of these parameters, or of some of them, has ended. Outside backward passes."""
        home = former.home
        if any(former.has_sums):
            for replica in range(len(former.has_sums)):
                former.take_back(replica)
            # With fresh hooks nobody would know the copies for sums: the next step added all of them, N times the sum.
            home = max(home, GradientHome.PARTIAL_SUM)
        self.home = max(self.home, home)
        self.sums_after_runs = former.sums_after_runs

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
            self.has_sums[replica] = False
        if not self.has_sums[replica]:
            self._sums[replica].discard(self._index[replica].get(id(parameter), -1))

    def _forget(self, replica: int) -> None:
        self.has_sums[replica] = False
        self._sums[replica].clear()

    def _hook(self) -> None:
        for at, copies in enumerate(self._parameters):
            for replica, copy in enumerate(copies):
                if copy.requires_grad and copy.is_leaf:
                    copy.register_hook(EngineHook(self._accumulating, replica, at))  # type: ignore[no-untyped-call]
        self._is_hooked = True

    def _accumulating(self, replica: int, at: int) -> None:
        """A backward pass brings a gradient: what a replica was given is no part of it."""
        self.has_sums[replica] = False
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
