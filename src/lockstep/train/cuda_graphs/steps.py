"""The steps of a fit, each run as it is, looked at, recorded, or replayed: which of these is chosen here.

    first of its kind        as it is: optimizer state, buffers and libraries' workspaces are made
    second, third            looked at; when two in a row were alike
    next                     recorded, and replayed
    all others               replayed

The first step of an epoch is looked at once more: callbacks may have changed what Python computes with. A kind is what
batches of one signature have in common, at one place of an accumulation cycle. What is chosen follows from the steps
alone and never from time, so the same program makes the same choices.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.hooks import current_observer
from lockstep.strategies.base import Strategy
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
from lockstep.train.cuda_graphs.guards import NotCapturableError, Reasons, check_hooks, driver_for, refuse
from lockstep.train.cuda_graphs.trace import ObservedStep, StepTrace
from lockstep.train.step import ReplicaState, StepOutput, train_step

MAX_KINDS = 32
"""More kinds of batches than this in one fit: shapes change all the time, and few recordings would be used again."""
MAX_RECORDINGS = 16
"""More recordings than this in one fit: something changes that each of them takes for granted."""
MAX_DIFFERENCES = 4
"""So often may a step differ from the one before it, in one fit."""


@dataclass
class _Kind:
    """What is known of one kind of step."""

    seen: bool = False
    trace: StepTrace | None = None
    alike: bool = False
    recorded: CapturedStep | None = None

    def forget(self) -> None:
        """Drops what a change has made untrue."""
        self.trace, self.alike, self.recorded = None, False, None


class GraphedSteps:
    """Runs training steps of all replicas.

    Args:
        strategy: whose replicas.
        setup: what they share.
        states: one per replica.

    Attributes:
        reasons: why steps were not recorded.
        replays: how many steps were replays.
        recordings: how many were recorded.
    """

    def __init__(self, strategy: Strategy, setup: TrainSetup, states: PerReplica[ReplicaState]) -> None:
        self._strategy = strategy
        self._setup = setup
        self._states = states
        self._carried = CarriedState(setup.module.copies, states.values)
        self._kinds: dict[Hashable, _Kind] = {}
        self._differences = 0
        self._looked_at = -1  # the last epoch in which a step was like an earlier one of its kind
        self.reasons = Reasons()
        self.replays = self.recordings = 0
        self._capture = self._make_recorder()

    def run(self, batch: Any, due: bool, *, epoch: int) -> tuple[StepOutput, ...]:
        """One step of every replica.

        Args:
            batch: the global batch, divided.
            due: whether it ends with an update.
            epoch: from 0.

        Returns:
            What each replica's step gave, in replica order.
        """
        if self._capture is None or current_observer() is not None:
            return self._as_it_is(batch, due)
        entering = self._carried.now()
        try:
            kind = self._kind(batch, due, entering)
            ready = self._looked_at == epoch and self._prepare(kind, self._capture, batch, due)
            results = self._replay(kind, batch, entering) if ready else None
        except NotCapturableError as unfit:
            self._give_up(unfit)
            return self._as_it_is(batch, due)
        if results is not None:
            return self._completed(results)
        if not kind.seen:
            kind.seen = True
            return self._as_it_is(batch, due)
        return self._look(kind, batch, due, epoch)

    def close(self) -> None:
        """Drops all recordings and the memory that they hold."""
        self._kinds.clear()
        self._capture = None

    def _make_recorder(self) -> GraphCapture | None:
        if not self._setup.config.graphs:
            return None
        try:
            driver = driver_for(self._strategy)
            if driver is None:
                return None
            refuse(self._setup)
            return GraphCapture(self._strategy, self._setup, self._states, self._carried, driver)
        except NotCapturableError as unfit:
            self.reasons.tell(str(unfit))
            return None

    def _kind(self, batch: Any, due: bool, entering: Snapshot) -> _Kind:
        key = (signature(batch), due, entering.kind)
        if key not in self._kinds and len(self._kinds) == MAX_KINDS:
            raise NotCapturableError(
                f"batches came in more than {MAX_KINDS} shapes; pad them to one length, or a few (buckets)"
            )
        return self._kinds.setdefault(key, _Kind())

    def _prepare(self, kind: _Kind, recorder: GraphCapture, batch: Any, due: bool) -> bool:
        """Whether the step can be replayed; records it if its time has come, forgets a recording that is outdated."""
        if not kind.alike:
            return False
        if kind.recorded is not None:
            if kind.recorded.standing.change() is not None:
                kind.forget()
            return kind.alike
        if self.recordings == MAX_RECORDINGS:
            raise NotCapturableError(f"what a recording takes for granted changed {MAX_RECORDINGS} times")
        check_hooks(self._setup.module.module)
        self.recordings += 1
        kind.recorded = recorder.record(batch, due)
        return True

    def _replay(self, kind: _Kind, batch: Any, entering: Snapshot) -> StepResults | None:
        self.replays += 1
        self._setup.module.outside_changes.note_replay()
        return None if kind.recorded is None else kind.recorded.replay(batch, entering)

    def _look(self, kind: _Kind, batch: Any, due: bool, epoch: int) -> tuple[StepOutput, ...]:
        watch = ObservedStep(self._strategy, self._setup, self._states.values, self._carried)
        watch.run(batch, due)
        try:
            watch.check()
            self._compare(kind, watch.trace, epoch)
        except NotCapturableError as unfit:
            self._give_up(unfit)
        return self._completed(watch.results)

    def _compare(self, kind: _Kind, trace: StepTrace, epoch: int) -> None:
        before, kind.trace = kind.trace, trace
        if before is None:
            return
        difference = before.difference(trace)
        if difference is None:
            kind.alike, self._looked_at = True, epoch
            return
        for other in self._kinds.values():  # what is another now may be so in all of them
            other.forget()
        kind.trace = trace
        self._differences += 1
        if self._differences == MAX_DIFFERENCES:
            raise NotCapturableError(f"steps differ from each other: {difference}")

    def _completed(self, results: StepResults) -> tuple[StepOutput, ...]:
        update_metrics(self._strategy, self._states.values, results.metrics)
        return results.outputs

    def _as_it_is(self, batch: Any, due: bool) -> tuple[StepOutput, ...]:
        results = self._strategy.run(train_step, (self._setup, self._states, batch, due))
        return self._strategy.local_results(results)

    def _give_up(self, unfit: NotCapturableError) -> None:
        self.reasons.tell(str(unfit))
        self.close()
