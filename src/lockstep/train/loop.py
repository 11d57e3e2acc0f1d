"""The loops over batches, outside the replicas: one epoch of training, one evaluation, one prediction.

fit -> TrainLoop.run_epoch -> strategy.run -> train_step (in each replica): forward, backward, update
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import DataError, NonFiniteLossError
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.update import StepResult
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.outputs import CollectedOutputs
from lockstep.train.precision import Precision
from lockstep.train.step import (
    Job,
    ReplicaState,
    StepOutput,
    clear_gradients,
    evaluate_step,
    finish_cycle,
    predict_step,
    train_step,
)
from lockstep.train.timing import StepClock


class RunningLoss:
    """The summed losses and counts of a pass so far."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0.0

    def add(self, outputs: Iterable[StepOutput]) -> None:
        """Adds one step's sums of all replicas."""
        for output in outputs:
            self._total += float(output.total)
            self._count += float(output.count)

    @property
    def value(self) -> float:
        """Summed total / summed count: the mean over all that was counted; NaN while nothing was."""
        return self._total / self._count if self._count else float("nan")

    def final(self) -> float:
        """The value at the end of the pass.

        Raises:
            DataError: nothing was counted, so there is no loss.
        """
        if not self._count:
            raise DataError(
                "the loss counted nothing over the whole data: all batches have 0 rows, or the loss's counts are 0; "
                "give data with examples to count"
            )
        return self.value


class TrainLoop:
    """Trains epochs on one strategy.

    Args:
        strategy: runs the steps.
        job: what the replicas share.
        scheduler: stepped here, in the caller's thread, once per update.
        callbacks: hear of every batch.
        should_stop: asked after each batch.
    """

    def __init__(
        self,
        strategy: Strategy,
        job: Job,
        *,
        scheduler: LRScheduler | None,
        callbacks: CallbackList,
        should_stop: Callable[[], bool],
    ) -> None:
        self._strategy = strategy
        self._job = job
        self._scheduler = scheduler
        self._callbacks = callbacks
        self._should_stop = should_stop
        self._metrics = ReplicaMetrics(job.config.metrics, _torch_devices(strategy))
        self._states = PerReplica([ReplicaState(metrics) for metrics in self._metrics.per_replica])
        strategy.run(clear_gradients, (job, self._states))

    def run_epoch(self, feed: Feed, epoch: int, clock: StepClock) -> dict[str, float]:
        """One epoch: a step per global batch, an update per ``accumulate`` of them and for what is left at the end.

        Returns:
            The epoch's loss and metrics.

        Raises:
            NonFiniteLossError: the loss became NaN or infinite; the weights are those of the last good update.
        """
        loss, step = RunningLoss(), 0
        self._metrics.reset()
        clock.start()
        with closing(feed.epoch(epoch)) as batches:
            for step, batch in enumerate(batches, start=1):
                clock.pause()
                self._callbacks.call("on_train_batch_begin", step - 1)
                clock.start()
                with _located(epoch, step):
                    due = step % self._job.config.accumulate == 0
                    results = self._strategy.run(train_step, (self._job, self._states, batch, due))
                outputs = self._strategy.local_results(results)
                self._after_update(outputs[0].update)
                loss.add(outputs)
                clock.stop(rows=sum(output.rows for output in outputs))
                metrics = self._metrics.compute() if self._callbacks.wants_batch_logs() else {}
                self._callbacks.call("on_train_batch_end", step - 1, logs={"loss": loss.value, **metrics})
                if self._should_stop():
                    break
                clock.start()
        if step % self._job.config.accumulate:
            with _located(epoch, step):
                results = self._strategy.run(finish_cycle, (self._job, self._states))
            self._after_update(self._strategy.local_results(results)[0])
        return {"loss": loss.final(), **self._metrics.compute()}

    def _after_update(self, update: StepResult | None) -> None:
        if self._scheduler is not None and update is not None and not update.skipped:
            self._scheduler.step()


def run_evaluation(
    strategy: Strategy, job: Job, feed: Feed, *, callbacks: CallbackList, clock: StepClock
) -> dict[str, float]:
    """The loss and metrics over the data; nothing is trained."""
    metrics = ReplicaMetrics(job.config.metrics, _torch_devices(strategy))
    states = PerReplica([ReplicaState(own) for own in metrics.per_replica])
    loss = RunningLoss()
    callbacks.call("on_test_begin")
    clock.start()
    with torch.no_grad(), closing(feed.epoch(0)) as batches:
        for step, batch in enumerate(batches):
            clock.pause()
            callbacks.call("on_test_batch_begin", step)
            clock.start()
            outputs = strategy.local_results(strategy.run(evaluate_step, (job, states, batch)))
            loss.add(outputs)
            clock.stop(rows=sum(output.rows for output in outputs))
            callbacks.call("on_test_batch_end", step, logs={"loss": loss.value})
            clock.start()
    logs = {"loss": loss.final(), **metrics.compute()}
    callbacks.call("on_test_end", logs=logs)
    return logs


def run_prediction(
    strategy: Strategy,
    module: MirroredModule,
    precision: Precision,
    feed: Feed,
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> Any:
    """The module's outputs for all rows, in the order of the data, on the CPU."""
    collected = CollectedOutputs()
    callbacks.call("on_predict_begin")
    clock.start()
    with torch.no_grad(), closing(feed.epoch(0)) as batches:
        for step, batch in enumerate(batches):
            clock.pause()
            callbacks.call("on_predict_batch_begin", step)
            clock.start()
            shards = strategy.local_results(strategy.run(predict_step, (module, precision, batch)))
            for shard in shards:
                if shard.rows:
                    collected.add(shard.rows, shard.outputs)
            clock.stop(rows=sum(shard.rows for shard in shards))
            callbacks.call("on_predict_batch_end", step)
            clock.start()
    callbacks.call("on_predict_end")
    return collected.joined()


@contextmanager
def _located(epoch: int, step: int) -> Iterator[None]:
    """Says in which epoch and step, both from 1, the loss was not finite."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error}") from error


def _torch_devices(strategy: Strategy) -> list[torch.device]:
    return [device.torch_device for device in strategy.devices]
