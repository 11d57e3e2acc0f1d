"""The training loop over batches, outside the replicas.

run_fit -> TrainLoop.run_epoch -> strategy.run -> train_step (in each replica): forward, backward, update
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from lockstep.collectives.per_replica import PerReplica
from lockstep.collectives.workers import Wish
from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.update import StepResult
from lockstep.strategies.base import Strategy
from lockstep.train.agreed_stop import AgreedStop
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.job import Job
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.running_loss import RunningLoss
from lockstep.train.step import ReplicaState, StepOutput, clear_gradients, finish_cycle, train_step
from lockstep.train.timing import StepClock


class TrainLoop:
    """Trains epochs on one strategy.

    Args:
        strategy: runs the steps.
        job: what the replicas share.
        callbacks: hear of every batch.
        stop: asked after each batch.

    Attributes:
        epoch: the epoch that is under way or comes next, from 0.
        batch: how many of its global batches are done.
        step: how many global batches are done in all.
        pending: how many of the last ones wait for their update.
        loss: of the epoch so far.
        metrics: of the epoch so far.
    """

    def __init__(self, strategy: Strategy, job: Job, *, callbacks: CallbackList, stop: AgreedStop) -> None:
        self._strategy = strategy
        self._job = job
        self._callbacks = callbacks
        self._stop = stop
        self._workers = strategy.workers
        self.epoch = self.batch = self.step = self.pending = 0
        self.loss = RunningLoss()
        self.metrics = ReplicaMetrics.on(strategy, job.config.metrics)
        self._states = PerReplica([ReplicaState(metrics) for metrics in self.metrics.per_replica])
        strategy.run(clear_gradients, (job, self._states))

    def run_epoch(self, feed: Feed, clock: StepClock) -> dict[str, float]:
        """One epoch: a step per global batch, an update per ``accumulate`` of them and for what is left at the end.

        It goes on after the batches of the epoch that are done already, if the state of another loop was loaded.

        Returns:
            The epoch's loss and metrics.

        Raises:
            NonFiniteLossError: the loss became NaN or infinite; the weights are those of the last good update.
        """
        if not self.batch:
            self.loss = RunningLoss()
            self.metrics.reset()
        clock.start()
        with closing(feed.epoch(self.epoch, skip=self.batch)) as batches:
            for batch in batches:
                clock.pause()
                self._callbacks.call("on_train_batch_begin", self.batch)
                clock.start()
                rows = self._train(batch)
                clock.stop(rows=rows)
                self._tell()
                if self._stop.after_batch():
                    break
                clock.start()
        if self.pending:
            self._finish_cycle()
        self.epoch, self.batch = self.epoch + 1, 0
        clock.examples = self._end_of_epoch(clock.examples)
        return {"loss": self.loss.final(), **self.metrics.compute()}

    def _train(self, batch: Any) -> int:
        """A step of every replica, and the update if it is due; the rows of the local ones."""
        if self._callbacks.wants_batch_logs():
            self._workers.wish(Wish.LOGS)
        due = (self.batch + 1) % self._job.config.accumulate == 0
        with _located(self.epoch, self.batch + 1):
            results = self._strategy.run(train_step, (self._job, self._states, batch, due))
        outputs = self._strategy.local_results(results)
        self._after_update(outputs[0].update)
        self._count(outputs)
        self.batch, self.step = self.batch + 1, self.step + 1
        self.pending = 0 if due else self.pending + 1
        return sum(output.rows for output in outputs)

    def _tell(self) -> None:
        """Tells the callbacks of a batch that is done, of its metrics too where those of some worker show them."""
        if self._workers.alone or self.pending:  # an update of several workers has told their wishes already
            self._workers.exchange("end of a batch")
        wishes = self._workers.granted
        metrics = self.metrics.compute() if Wish.LOGS in wishes else {}
        self._callbacks.call("on_train_batch_end", self.batch - 1, logs={"loss": self.loss.value, **metrics})
        self._workers.settle(wishes & ~Wish.STOP)

    def _finish_cycle(self) -> None:
        """The update of the batches that the end of the epoch has cut off from the rest of their cycle."""
        with _located(self.epoch, self.batch):
            results = self._strategy.run(finish_cycle, (self._job, self._states))
        update = self._strategy.local_results(results)[0]
        self._after_update(update)
        if not self._workers.alone:
            self.loss.add(update.total, update.count)
        self.pending = 0

    def _count(self, outputs: Sequence[StepOutput]) -> None:
        """Adds a step to the loss. With several workers it is the update that knows the sums of all replicas."""
        if self._workers.alone:
            for output in outputs:
                self.loss.add(output.total, output.count)
        elif outputs[0].update is not None:
            self.loss.add(outputs[0].update.total, outputs[0].update.count)

    def _end_of_epoch(self, rows: int) -> int:
        """The rows of all workers; a check that all have the same weights still; a stop wished after the last batch."""
        if self._workers.alone:
            return rows
        self._job.module.compare_weights()
        everyones = self._workers.exchange("end of an epoch", [rows])
        self._stop.heard()
        return int(sum(each for (each,) in everyones))

    def _after_update(self, update: StepResult | None) -> None:
        if self._job.scheduler is not None and update is not None and not update.skipped:
            self._job.scheduler.step()


@contextmanager
def _located(epoch: int, step: int) -> Iterator[None]:
    """Says in which epoch and step, both from 1, the loss was not finite."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error}") from error
