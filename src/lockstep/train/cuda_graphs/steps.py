"""Runs each training step of a fit: as usual, observed, or captured as a CUDA graph and replayed.

    first of its kind        runs as usual: optimizer state, buffers and workspaces of libraries are created
    second, third            observed, until two in a row were alike
    next                     captured and replayed
    all others               replayed:

    batch            -> copied to fixed addresses --.
    learning rates   -> tensors on the device ------+-- replay --> outputs, copied for the caller

The first step of each epoch is observed once more, as callbacks may have changed what Python computes with. Steps are
of one kind if one captured step serves their batches. The choice depends on the steps alone and never on time, so that
a program makes the same choices each time it runs. Metrics count in Python, so they are updated after the step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep._torch_compat import foreach_copy_, tree_flatten, tree_map, tree_unflatten
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.replicas.hooks import current_observer
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.checks import NotCapturableError, StepRecord, check_setup
from lockstep.train.step import ReplicaState, StepOutput, train_step, update_metrics

_LOG = logging.getLogger("lockstep")

MAX_BEGINNINGS = 32
"""How often steps are observed anew in one fit: with more kinds of batches or changes, few would be replayed."""


class LaterMetrics(list[tuple[Any, Any]]):
    """Takes the place of a replica's metrics, and keeps the (outputs, targets) that they are to be updated with."""

    def update(self, outputs: Any, targets: Any) -> None:
        self.append((outputs, targets))


_Results = tuple[tuple[StepOutput, ...], list[LaterMetrics]]


@dataclass
class _Kind:
    """What is known of one kind of step."""

    record: StepRecord | None = None  # of the last one that was observed
    alike: bool = False  # to the one before it
    replay: Callable[[list[Any]], _Results] | None = None


class GraphedSteps:
    """Runs the training steps of all replicas, replayed from CUDA graphs where possible.

    Where steps cannot be captured, the log "lockstep" says why, and they run as usual.
    """

    def __init__(
        self, setup: TrainSetup, optimizer: MirroredOptimizer, states: PerReplica[ReplicaState], driver: DeviceDriver
    ) -> None:
        self._setup, self._optimizer, self._states, self._driver = setup, optimizer, states, driver
        self._strategy, self._device = setup.strategy, setup.strategy.devices[0].torch_device
        self._pool = driver.graph_pool(self._device)
        self._kinds: dict[Hashable, _Kind] = {}
        self._beginnings, self._gave_up = 0, False
        self._alike_in = -1  # the last epoch in which a step was like the one before it of its kind

    @classmethod
    def create(cls, setup: TrainSetup, states: PerReplica[ReplicaState]) -> GraphedSteps | None:
        """The steps of a fit; None on a CPU and with ``graphs=False``."""
        driver, optimizer = driver_of(setup.strategy.devices[0]), setup.optimizer
        if driver is None or optimizer is None or not setup.config.graphs:
            return None
        return cls(setup, optimizer, states, driver)

    def run(self, batch: Any, *, epoch: int) -> tuple[StepOutput, ...] | None:
        """One step of every replica on a sharded batch; None if it is to run as usual. Epochs count from 0."""
        if self._gave_up or current_observer() is not None:
            return None
        try:
            leaves, structure = _flat(batch, self._strategy)
            key = (structure, *map(_form, leaves))
            if key not in self._kinds:
                self._begin(f"batches came in more than {len(self._kinds)} shapes; pad them to one length, or a few")
                self._kinds[key] = _Kind()
                return None
            kind = self._kinds[key]
            self._setup.module.propagation.follow()  # as a run would: what was set on the user's module, to all copies
            record = StepRecord(self._setup, self._optimizer, _tensors(leaves))
            if kind.record is not None and (change := kind.record.change(record)) is not None:
                self._forget(change)
            if kind.alike and self._alike_in == epoch:
                kind.replay = kind.replay or self._capture(leaves, structure)
                outputs, metrics = kind.replay(leaves)
                self._setup.module.propagation.note_replay()
            else:
                outputs, metrics = self._observe(kind, record, batch, epoch)
        except NotCapturableError as reason:
            self._give_up(reason)
            return None
        if any(metrics):
            self._strategy.run(update_metrics, (self._states, PerReplica(metrics)))
        return outputs

    def _begin(self, reason: str) -> None:
        """Before steps are observed anew, for ``reason``."""
        check_setup(self._setup, self._optimizer)
        self._beginnings += 1
        if self._beginnings > MAX_BEGINNINGS:
            raise NotCapturableError(reason)

    def _forget(self, change: str) -> None:
        """Drops all captured steps: what has changed for one kind may have changed for all."""
        self._begin(f"{change} changed between steps, again and again")
        for kind in self._kinds.values():
            kind.record, kind.alike, kind.replay = None, False, None
        self._pool = self._driver.graph_pool(self._device)  # torch captures no graph into the pool of the last one

    def _give_up(self, reason: object) -> None:
        _LOG.info("no CUDA graphs of whole steps: %s", reason)
        self._kinds.clear()  # frees the captured steps and their memory
        self._gave_up = True

    def _observe(self, kind: _Kind, record: StepRecord, batch: Any, epoch: int) -> _Results:
        """Runs a step as usual, and compares it with the one before of its kind."""
        states, metrics = self._without_metrics()
        with record:
            outputs = self._strategy.run(train_step, (self._setup, states, batch, True))
        difference = None if kind.record is None else kind.record.difference(record)
        if record.wait is not None:
            self._give_up(f"the step reads from the device: {record.wait}")
        elif difference is not None:
            self._give_up(f"steps differ from each other: {difference}")
        elif kind.record is not None:
            kind.alike, self._alike_in = True, epoch
        kind.record = record
        return self._strategy.local_results(outputs), metrics

    def _capture(self, leaves: list[Any], structure: Any) -> Callable[[list[Any]], _Results]:
        """Captures the step for batches like this one. Nothing is computed; the result runs the step on another one.

        A schedule writes its rates as numbers into the optimizer's groups. A captured step would keep those of its
        capture, so fused kernels read them from float32 tensors instead. If the device refuses, a NotCapturableError is
        raised, and everything is as it was before.
        """
        setup, strategy, storages = self._setup, self._strategy, self._optimizer.storages
        try:
            own = [_cloned(leaf) for leaf in leaves]  # there may be no memory for it
            inputs, shards = _tensors(own), PerReplica(tree_unflatten(own, structure))
            rates = [torch.zeros((), dtype=torch.float32, device=self._device) for _ in self._optimizer.param_groups]
            states, metrics = self._without_metrics()
            graph = self._driver.graph(self._device, strategy.generators.on_gpu(), self._pool)
            storages.rates = rates
            with graph.recording():
                results = strategy.run(train_step, (setup, states, shards, True))
        except Exception as error:  # an error of the user's code is raised again when the step runs as usual
            line = str(error).strip().split("\n", 1)[0]
            raise NotCapturableError(f"the step could not be captured: {type(error).__name__}: {line}") from error
        finally:
            storages.rates = None
            for duplicate in setup.module.copies:
                duplicate.zero_grad()
        outputs = strategy.local_results(results)

        def replay(leaves: list[Any]) -> _Results:
            if inputs:
                foreach_copy_(inputs, _tensors(leaves), non_blocking=True)
            for rate, group in zip(rates, self._optimizer.param_groups, strict=True):
                rate.fill_(group["lr"])
            graph.replay()
            # The next replay overwrites the numbers in the outputs, whose copy to the host is queued by then. What the
            # metrics get, and may keep, is copied.
            return outputs, [LaterMetrics(tree_map(_cloned, list(each))) for each in metrics]

        return replay

    def _without_metrics(self) -> tuple[PerReplica[ReplicaState], list[LaterMetrics]]:
        """States for a step that updates no metric, and what it leaves for them."""
        states, metrics = list(map(copy.copy, self._states.values)), [LaterMetrics() for _ in self._states.values]
        for state, later in zip(states, metrics, strict=True):
            state.metrics = {"later": later} if state.metrics else {}
        return PerReplica(states), metrics


def _flat(batch: Any, strategy: Strategy) -> tuple[list[Any], Any]:
    """The leaves of a batch's shards, one per replica, and their structure.

    Raises a NotCapturableError for a leaf that has no fixed address on the device and cannot be compared.
    """
    replicas, device = len(strategy.devices), strategy.devices[0].torch_device
    leaves, structure = tree_flatten([select(batch, replica, replicas) for replica in range(replicas)])
    for leaf in leaves:
        if not isinstance(leaf, (int, float, complex, str, type(None))) and not (
            is_plain(leaf) and leaf.device == device
        ):
            kind = f"{leaf.layout} tensor on {leaf.device}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise NotCapturableError(f"the batches hold a {kind}; give dense tensors, numbers or strings")
    return leaves, structure


def _form(leaf: Any) -> Hashable:
    """What a leaf has in common in two batches if one captured step serves both."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
