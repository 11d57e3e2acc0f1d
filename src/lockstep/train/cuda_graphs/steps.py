"""Chooses how each training step of a fit runs: as usual, observed, captured, or replayed.

    first of its kind        runs as usual: optimizer state, buffers and workspaces of libraries are created
    second, third            observed, until two in a row were alike
    next                     captured and replayed
    all others               replayed

The first step of each epoch is observed once more, as callbacks may have changed what Python computes with. Steps are
of one kind if their batches have the same signature and they stand at the same place of an accumulation cycle. The
choice depends on the steps alone and never on time, so that a program makes the same choices each time it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.device.driver import DeviceDriver
from lockstep.replicas.hooks import current_observer
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.capture import (
    CapturedStep,
    CarriedState,
    GraphCapture,
    Snapshot,
    StepResults,
    signature,
    update_metrics,
)
from lockstep.train.cuda_graphs.guards import NotCapturableError, check_hooks, check_setup, driver_for
from lockstep.train.cuda_graphs.trace import ObservedStep, StepTrace
from lockstep.train.step import ReplicaState, StepOutput, train_step

_LOG = logging.getLogger("lockstep")

MAX_KINDS = 32
"""With more kinds of batches in one fit, shapes change all the time and few captured steps would be replayed."""
MAX_CAPTURES = 16
"""With more captures in one fit, something changes all the time that each captured step assumes."""
MAX_DIFFERENCES = 4
"""How often a step may differ from the one before it in one fit."""


@dataclass
class _Kind:
    """What is known of one kind of step."""

    seen: bool = False
    trace: StepTrace | None = None
    alike: bool = False
    captured: CapturedStep | None = None

    def forget(self) -> None:
        """Drops what a change has made invalid."""
        self.trace, self.alike, self.captured = None, False, None


class GraphedSteps:
    """Runs the training steps of all replicas, replayed from CUDA graphs where possible.

    Where steps cannot be captured, the log "lockstep" says why, and they run as usual.
    """

    def __init__(self, setup: TrainSetup, states: PerReplica[ReplicaState], driver: DeviceDriver) -> None:
        self._strategy, self._setup, self._states = setup.strategy, setup, states
        self._carried = CarriedState(setup.module.copies, states.values)
        self._capture: GraphCapture | None = GraphCapture(setup, states, self._carried, driver)
        self._kinds: dict[Hashable, _Kind] = {}
        self._captures = self._differences = 0
        self._alike_in = -1  # the last epoch in which a step was like the one before it of its kind

    @classmethod
    def create(cls, setup: TrainSetup, states: PerReplica[ReplicaState]) -> GraphedSteps | None:
        """The steps of a fit; None where none can be captured: on a CPU, or for a reason that is logged."""
        if not setup.config.graphs:
            return None
        try:
            driver = driver_for(setup.strategy)
            if driver is None:
                return None
            check_setup(setup)
            return cls(setup, states, driver)
        except NotCapturableError as reason:
            _log(reason)
            return None

    def run(self, batch: Any, due: bool, *, epoch: int) -> tuple[StepOutput, ...]:
        """One step of every replica on a sharded batch, with an update if it is ``due``. Epochs count from 0."""
        if self._capture is None or current_observer() is not None:
            return self._run(batch, due)
        entering = self._carried.now()
        try:
            kind = self._kind(batch, due, entering)
            if self._alike_in == epoch and (captured := self._captured(kind, self._capture, batch, due)) is not None:
                self._setup.module.propagation.note_replay()
                return self._complete(captured.replay(batch, entering))
        except NotCapturableError as reason:
            self._give_up(reason)
            return self._run(batch, due)
        if not kind.seen:
            kind.seen = True
            return self._run(batch, due)
        return self._observe(kind, batch, due, epoch)

    def _kind(self, batch: Any, due: bool, entering: Snapshot) -> _Kind:
        key = (signature(batch), due, entering.kind)
        if key not in self._kinds and len(self._kinds) == MAX_KINDS:
            raise NotCapturableError(
                f"batches came in more than {MAX_KINDS} shapes; pad them to one length, or a few (buckets)"
            )
        return self._kinds.setdefault(key, _Kind())

    def _captured(self, kind: _Kind, capture: GraphCapture, batch: Any, due: bool) -> CapturedStep | None:
        """The captured step of a kind if it can be replayed, captured now if its time has come."""
        if kind.captured is not None and kind.captured.guards.change() is not None:
            kind.forget()
        if kind.alike and kind.captured is None:
            if self._captures == MAX_CAPTURES:
                raise NotCapturableError(f"what a captured step assumes changed {MAX_CAPTURES} times")
            check_hooks(self._setup.module.module)
            self._captures += 1
            kind.captured = capture.capture(batch, due)
        return kind.captured

    def _observe(self, kind: _Kind, batch: Any, due: bool, epoch: int) -> tuple[StepOutput, ...]:
        observed = ObservedStep(self._setup, self._states, self._carried, batch, due)
        try:
            observed.check()
            self._compare(kind, observed.trace, epoch)
        except NotCapturableError as reason:
            self._give_up(reason)
        return self._complete(observed.results)

    def _compare(self, kind: _Kind, trace: StepTrace, epoch: int) -> None:
        before, kind.trace = kind.trace, trace
        if before is None:
            return
        difference = before.difference(trace)
        if difference is None:
            kind.alike, self._alike_in = True, epoch
            return
        for other in self._kinds.values():  # what has changed here may have changed in all of them
            other.forget()
        kind.trace = trace
        self._differences += 1
        if self._differences == MAX_DIFFERENCES:
            raise NotCapturableError(f"steps differ from each other: {difference}")

    def _complete(self, results: StepResults) -> tuple[StepOutput, ...]:
        update_metrics(self._strategy, self._states.values, results.metrics)
        return results.outputs

    def _run(self, batch: Any, due: bool) -> tuple[StepOutput, ...]:
        results = self._strategy.run(train_step, (self._setup, self._states, batch, due))
        return self._strategy.local_results(results)

    def _give_up(self, reason: NotCapturableError) -> None:
        _log(reason)
        self._kinds.clear()
        self._capture = None  # frees the captured steps and their memory


def _log(reason: NotCapturableError) -> None:
    _LOG.info("no CUDA graphs of whole steps: %s", reason)
