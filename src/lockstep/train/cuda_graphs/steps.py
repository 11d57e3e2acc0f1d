"""Chooses how each training step of a fit runs: as usual, observed, captured, or replayed.

    first of its kind        runs as usual: optimizer state, buffers and workspaces of libraries are created
    second, third            observed, until two in a row were alike
    next                     captured and replayed
    all others               replayed

The first step of each epoch is observed once more, as callbacks may have changed what Python computes with. Steps are
of one kind if their batches have the same signature. The choice depends on the steps alone and never on time, so that
a program makes the same choices each time it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.driver import DeviceDriver, DeviceGraph
from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep.replicas.hooks import current_observer
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.capture import (
    CapturedStep,
    DeviceLearningRates,
    StepInputs,
    capture_step,
    deferring_metrics,
    step_within,
)
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards, driver_for
from lockstep.train.cuda_graphs.trace import StepTrace
from lockstep.train.step import MetricInputs, ReplicaState, StepOutput, update_deferred_metrics

_LOG = logging.getLogger("lockstep")

MAX_KINDS = 32
"""With more kinds of batches in one fit, shapes change all the time and few captured steps would be replayed."""
MAX_CHANGES = 4
"""With more changes of what captured steps assume in one fit, most of its time would go into captures."""


@dataclass
class _Kind:
    """What is known of one kind of step."""

    seen: bool = False
    trace: StepTrace | None = None
    alike: bool = False
    captured: CapturedStep | None = None


class GraphedSteps:
    """Runs the training steps of all replicas, replayed from CUDA graphs where possible.

    Where steps cannot be captured, the log "lockstep" says why, and they run as usual.
    """

    def __init__(
        self, setup: TrainSetup, states: PerReplica[ReplicaState], driver: DeviceDriver, optimizer: MirroredOptimizer
    ) -> None:
        self._strategy, self._setup, self._states, self._driver = setup.strategy, setup, states, driver
        self._device = setup.strategy.devices[0].torch_device
        self._rates = DeviceLearningRates(optimizer, self._device)
        self._pool = driver.graph_pool(self._device)
        self._gave_up = False
        self._kinds: dict[Hashable, _Kind] = {}
        self._changes = 0
        self._alike_in = -1  # the last epoch in which a step was like the one before it of its kind

    @classmethod
    def create(cls, setup: TrainSetup, states: PerReplica[ReplicaState]) -> GraphedSteps | None:
        """The steps of a fit; None where none can be captured: on a CPU, or for a reason that is logged."""
        try:
            driver = driver_for(setup) if setup.config.graphs else None
        except NotCapturableError as reason:
            _log(reason)
            return None
        return None if driver is None or setup.optimizer is None else cls(setup, states, driver, setup.optimizer)

    def run(self, batch: Any, *, epoch: int) -> tuple[StepOutput, ...] | None:
        """One step of every replica on a sharded batch; None if it is to run as usual. Epochs count from 0."""
        if self._gave_up or current_observer() is not None:
            return None
        try:
            inputs = StepInputs.of(batch, len(self._strategy.devices))
            kind = self._kind(inputs)
            if kind.alike and self._alike_in == epoch:
                if kind.captured is None:
                    kind.captured = capture_step(self._setup, self._states, inputs, self._rates, self._new_graph)
                outputs, metrics = kind.captured.replay(inputs)
                self._setup.module.propagation.note_replay()
                return self._complete(outputs, metrics)
        except NotCapturableError as reason:
            self._give_up(reason)
            return None
        if not kind.seen:
            kind.seen = True
            return None
        return self._observe(kind, inputs, epoch)

    def _kind(self, inputs: StepInputs) -> _Kind:
        key = inputs.signature()
        if key not in self._kinds and len(self._kinds) == MAX_KINDS:
            raise NotCapturableError(
                f"batches came in more than {MAX_KINDS} shapes; pad them to one length, or a few (buckets)"
            )
        kind = self._kinds.setdefault(key, _Kind())
        if kind.captured is not None and (change := kind.captured.guards.change()) is not None:
            self._forget(f"{change} changed between them")
        return kind

    def _forget(self, change: str) -> None:
        """Drops all captured steps: what has changed for one kind may have changed for all."""
        self._changes += 1
        if self._changes == MAX_CHANGES:
            raise NotCapturableError(f"steps differ from each other: {change}")
        for kind in self._kinds.values():
            kind.trace, kind.alike, kind.captured = None, False, None
        self._pool = self._driver.graph_pool(self._device)  # torch captures no graph into the pool of the last one

    def _observe(self, kind: _Kind, inputs: StepInputs, epoch: int) -> tuple[StepOutput, ...]:
        """Runs a step as usual, and compares it with the one before of its kind."""
        setup, strategy = self._setup, self._strategy
        trace = StepTrace(len(strategy.devices), inputs.tensors)
        setup.module.align()  # as the run would: what was set on the user's module is no change by the step
        guards, drawn = StepGuards(setup), _host_generators(strategy)
        with deferring_metrics(self._states.values) as metrics, HostSyncs() as reads:
            outputs = strategy.run(step_within, (trace.in_replica, setup, self._states, inputs.shards))
        try:
            if reads.syncs:
                operator, line = reads.syncs[0]
                raise NotCapturableError(f"the step reads from the device at {line} ({operator})")
            if not all(map(torch.equal, drawn, _host_generators(strategy))):
                raise NotCapturableError("the step draws random numbers on the host, which a replay would repeat")
            if (change := guards.change()) is not None:
                raise NotCapturableError(f"the step changes what a captured step assumes: {change}")
            difference = None if kind.trace is None else kind.trace.difference(trace)
            if difference is not None:
                self._forget(difference)
            elif kind.trace is not None:
                kind.alike, self._alike_in = True, epoch
            kind.trace = trace
        except NotCapturableError as reason:
            self._give_up(reason)
        return self._complete(strategy.local_results(outputs), metrics)

    def _new_graph(self) -> DeviceGraph:
        return self._driver.graph(self._device, self._strategy.generators.on_gpu(), self._pool)

    def _complete(self, outputs: tuple[StepOutput, ...], metrics: list[MetricInputs]) -> tuple[StepOutput, ...]:
        if any(metrics):
            self._strategy.run(update_deferred_metrics, (self._states, PerReplica(metrics)))
        return outputs

    def _give_up(self, reason: NotCapturableError) -> None:
        _log(reason)
        self._kinds.clear()  # frees the captured steps and their memory
        self._gave_up = True


def _host_generators(strategy: Strategy) -> list[torch.Tensor]:
    """The states of the replicas' host generators, if the device draws from others."""
    on_host = strategy.devices[0].torch_device.type == "cpu"
    return [] if on_host else [state["cpu"] for state in strategy.generators.states()]


def _log(reason: NotCapturableError) -> None:
    _LOG.info("no CUDA graphs of whole steps: %s", reason)
