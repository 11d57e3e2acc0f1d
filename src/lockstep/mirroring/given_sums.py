"""Gradients that a step looks at before the update: each replica is given the sums over all of them.

    backward -> param.grad read in the step -> [meet: sums] -> every replica sees the sum, in memory of its own
             -> clipped, scaled, logged, as on one device -> optimizer.step() takes replica 0's, as they are then

So ``clip_grad_norm_`` between ``backward()`` and ``step()`` is what it is on one device. A backward pass that comes
after the read adds to the sums of the first replica of all, and to nothing in the others: so all is there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

from lockstep.collectives.reduce import mark_summed
from lockstep.mirroring.exchange import Copies
from lockstep.mirroring.parameter_hooks import EngineHook
from lockstep.replicas.context import ReplicaContext


class GivenSums:
    """The sums of one optimizer's gradients, as replicas were given them.

    Args:
        parameters: per parameter its local copies, one per local replica.
        keeps_sums: whether the first local replica is the first of all, whose gradients are the sums.
    """

    def __init__(self, parameters: Sequence[Copies], *, keeps_sums: bool) -> None:
        self._parameters = parameters
        self._keeps_sums = keeps_sums
        replicas = len(parameters[0]) if parameters else 0
        self._index = [{id(copies[replica]): at for at, copies in enumerate(parameters)} for replica in range(replicas)]
        self._given = [False] * replicas
        # By replica, the numbers of the parameters whose ".grad" is no part of its own, but a sum that it was given.
        self._sums: list[set[int]] = [set() for _ in range(replicas)]
        self._hooked = False

    def given_to(self, replica: int) -> bool:
        """Whether the gradients of a local replica are the sums now, and nothing was added since."""
        return self._given[replica]

    def give(self, context: ReplicaContext) -> None:
        """Gives each replica its own copy of the sums, which the first holds. Every replica must call it."""
        replica = context.local_replica
        if not self._hooked:
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
        self._given[replica] = True

    def take_back(self, replica: int, *, all_but_first: bool = False) -> None:
        """Drops what a replica was given, so that its gradients are its own part alone.

        Args:
            replica: a local one.
            all_but_first: leave the first local replica's, which the update is to take.
        """
        if replica or not all_but_first:
            with torch._C.DisableTorchFunction():  # the replica's guard would take it for the step's own doing
                for at in self._sums[replica]:
                    self._parameters[at][replica].grad = None
        self.forget(replica)

    def forget(self, replica: int) -> None:
        """The gradients of a local replica have been cleared."""
        self._given[replica] = False
        self._sums[replica].clear()

    def assigned(self, replica: int, parameter: Any, value: Any) -> None:
        """The step assigns a parameter's ".grad"."""
        if value is None:
            self._given[replica] = False
        if not self._given[replica]:
            self._sums[replica].discard(self._index[replica].get(id(parameter), -1))

    def _hook(self) -> None:
        own = WeakMethod(self._accumulating)
        for at, copies in enumerate(self._parameters):
            for replica, copy in enumerate(copies):
                if copy.requires_grad and copy.is_leaf:
                    copy.register_hook(EngineHook(partial(_report, own, replica, at)))  # type: ignore[no-untyped-call]
        self._hooked = True

    def _accumulating(self, replica: int, at: int) -> None:
        """A backward pass brings a gradient: what a replica was given is no part of it."""
        self._given[replica] = False
        if at in self._sums[replica]:
            self._sums[replica].discard(at)
            with torch._C.DisableTorchFunction():
                self._parameters[at][replica].grad = None


def _report(own: WeakMethod[Any], replica: int, at: int, _: torch.Tensor) -> None:
    """The hook of a parameter; it must not keep the strategy alive."""
    accumulating = own()
    if accumulating is not None:
        accumulating(replica, at)
