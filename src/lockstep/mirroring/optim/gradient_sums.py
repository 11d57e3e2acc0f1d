"""The sums of some parameters' gradients over all replicas, for a program that looks at them before an update.

    backward: each replica's .grad -> sum -> replica 0's .grad -> the program reads, clips, logs -> an update

Each mirrored optimizer has one ``GradientSums``. Parameters that no optimizer holds, which a program updates by hand,
get one from the registry when they need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep._torch_compat import DisableTorchFunction
from lockstep.mirroring.gradients.local_sum import Copies, GradientExchange, Settings
from lockstep.mirroring.gradients.state import GradientHome, GradientState
from lockstep.mirroring.optim.update import slices_of
from lockstep.replicas.context import ReplicaContext, get_replica_context, own_context
from lockstep.replicas.owner import Owner
from lockstep.replicas.watcher import Totals


class GradientSums:
    """Sums the gradients of some parameters over all replicas.

    Args:
        owner: the strategy whose replicas have the gradients.
        parameters: for each parameter its copies, one for each local replica.
        groups: the local replicas by storage of the weights.
        exchange: sums a slice of the parameters.
        settings: a description that must be equal on all workers.

    Attributes:
        state: where the gradients are.
    """

    def __init__(
        self,
        owner: Owner,
        parameters: Sequence[Copies],
        groups: Sequence[Sequence[int]],
        exchange: GradientExchange,
        settings: Settings,
    ) -> None:
        self._owner = owner
        self.parameters = parameters
        self.groups = groups
        self.exchange = exchange
        self._settings = settings
        self._slices = slices_of(parameters, groups)
        self.state = GradientState(parameters, keeps_sums=exchange.keeps_sums)

    def sum_gradients(self) -> None:
        """Leaves the sums in replica 0's copies on every worker, for the next step. See ``MirroredOptimizer``."""
        context = own_context(self._owner, "optimizer")
        if context is None:
            self._owner.run(self.sum_gradients)
            return
        self.state.check_not_lost()
        self._sum_unless_final(context)
        self.state.home = GradientHome.FINAL_SUM

    def give(self, context: ReplicaContext) -> None:
        """Gives the calling replica the sums, for a step that reads them. Every replica must call it."""
        replica = context.local_replica
        if not self.state.has_sums[replica]:
            self.state.check_not_lost()
            with DisableTorchFunction():
                self._sum_unless_final(context)
                self.state.give(context)

    def sum_after_run(self) -> None:
        """After a run of the only worker: sums the gradients, so that the user's module has those of one device."""
        if self.state.wants_sum_after_run():
            for replica in range(len(self._owner.devices)):  # one without a backward pass since may have earlier sums
                self.state.take_back(replica)
            run_in_replicas(self._owner, self._sum)
            self.state.home = GradientHome.PARTIAL_SUM

    @contextmanager
    def sending_paused(self, module: nn.Module, replicas: Sequence[int]) -> Iterator[None]:
        """Inside the block backward passes through ``module`` in these local replicas send no gradients."""
        ids = {id(copies[0]) for copies in self.parameters}
        # Other modules still send theirs in the block.
        if not any(id(parameter) in ids for parameter in module.parameters()):
            yield
            return
        with self.state.unsynced(), self.exchange.sending_paused(replicas):
            yield

    def _sum_unless_final(self, context: ReplicaContext) -> None:
        """Sums the gradients; with several workers final sums stay, since replica 0 of each of them has them."""
        replica = context.local_replica
        is_final = self.state.home is GradientHome.FINAL_SUM and not self._owner.workers.is_single
        self.state.take_back(replica, all_but_first=is_final)
        if is_final:
            self.state.check_final(replica)
        else:
            self._sum(context)

    def _sum(self, context: ReplicaContext) -> None:
        """Leaves the sums in replica 0's copies, on every worker. Every replica must call it."""
        replica = context.local_replica
        # A read of ".grad" in a replica asks for these sums: the step guard would wait for them in here.
        with DisableTorchFunction():
            for watcher in context.watchers:
                parameters = [copies[replica] for copies in self.parameters]
                watcher.update_begins(replica, parameters, Totals(0.0, float(context.replica_id_in_sync_group == 0)))
            context.meet("sum of gradients", (0.0, 0.0), lambda totals: self.exchange.open(totals, self._settings))
            self.exchange.run(context, self._slices[replica])
            context.meet("end of the sum of gradients", None, lambda _: self._clear_followers())

    def _clear_followers(self) -> None:
        for copies in self.parameters:
            for leader, *_ in self.groups[1:]:
                copies[leader].grad = None


def run_in_replicas(owner: Owner, half: Callable[..., Any], *args: Any) -> Any:
    """Runs a half of an update in every local replica, for a caller outside replicas; returns the merged results."""
    return owner.run(_in_replica, (half, *args))


def _in_replica(half: Callable[..., Any], *args: Any) -> Any:
    return half(get_replica_context(), *args)


MakeSums = Callable[[Sequence[Copies], Settings], GradientSums]
"""Makes the sums of the gradients of some parameters, with what is left of earlier ones. Every worker must call it."""
