"""A step that is run as it is and looked at: does the host wait in it, and was it like the one before?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.device.host_syncs import HostReads
from lockstep.strategies.base import Strategy
from lockstep.train.graphs.carried import Carried
from lockstep.train.graphs.deferred import metrics_apart
from lockstep.train.graphs.inputs import tensors
from lockstep.train.graphs.recorded import StepResults
from lockstep.train.graphs.standing import Standing
from lockstep.train.graphs.trace import StepTrace
from lockstep.train.graphs.unfit import UnfitError
from lockstep.train.job import Job
from lockstep.train.step import ReplicaState, StepOutput, train_step


class Watch:
    """One look at a step.

    Attributes:
        results: what the step gave.
        trace: what it did.

    Args:
        strategy: runs it.
        job: whose step.
        states: the replicas'.
        carried: what earlier steps have left.
    """

    def __init__(self, strategy: Strategy, job: Job, states: Sequence[ReplicaState], carried: Carried) -> None:
        self._strategy, self._job, self._states, self._carried = strategy, job, states, carried

    def run(self, batch: Any, due: bool) -> None:
        """Runs the step."""
        strategy = self._strategy
        self.trace = StepTrace(len(strategy.devices), [*tensors(batch), *self._carried.now().tensors])
        self._job.module.align()  # as the run would: what was set on the user's module is no change of the step's
        standing, drawn = Standing(self._job, ()), self._host_random()
        with metrics_apart(self._states) as kept, HostReads() as reads:
            found = strategy.run(_watched_step, (self.trace, self._job, PerReplica(self._states), batch, due))
        self.results = StepResults(strategy.local_results(found), [each.arguments for each in kept])
        if self._job.module.is_compiled:
            outputs = [leaf for leaf in tree_leaves(self.results.metrics) if isinstance(leaf, torch.Tensor)]
            self.trace.end([*outputs, *self._carried.now().tensors])
        self._places = list(dict.fromkeys(reads.places))
        self._change = standing.change()
        self._drew = not all(map(torch.equal, drawn, self._host_random()))

    def check(self) -> None:
        """Whether such a step can be recorded.

        Raises:
            UnfitError: it cannot.
        """
        if self._places:
            operator, line = self._places[0]
            more = f", and in {len(self._places) - 1} other places" if len(self._places) > 1 else ""
            raise UnfitError(f"the step reads from the device at {line} ({operator}){more}")
        if self._drew:
            raise UnfitError("the step draws random numbers on the host, which a recording would repeat")
        if self._change is not None:
            raise UnfitError(f"the step changes what a recording takes for granted: {self._change}")

    def _host_random(self) -> list[torch.Tensor]:
        """Where the replicas' generators of the host stand, for devices that draw from others."""
        if self._strategy.devices[0].torch_device.type == "cpu":
            return []
        return [state["cpu"] for state in self._strategy.generators.states()]


@wraps(train_step)  # what the first run of a step is looked at for has been looked at
def _watched_step(trace: StepTrace, job: Job, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with trace.in_replica():
        return train_step(job, state, item, update)
