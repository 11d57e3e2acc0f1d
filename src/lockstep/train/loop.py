"""The training loop over batches, outside the replicas.

run_fit -> TrainLoop.run_epoch -> strategy.run -> train_step (in each replica): forward, backward, update
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from lockstep.collectives.communicator import Wish
from lockstep.collectives.per_replica import PerReplica
from lockstep.mirroring.update import StepResult
from lockstep.replicas.device.async_scalars import NO_NUMBERS, Arriving
from lockstep.strategies.base import Strategy
from lockstep.train.agreed_stop import AgreedStop
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.graphs.steps import TrainSteps
from lockstep.train.job import Job
from lockstep.train.late_logs import batch_logs
from lockstep.train.loss_state import telling_of_state
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.running_loss import RunningLoss
from lockstep.train.step import ReplicaState, StepOutput, clear_gradients, finish_cycle
from lockstep.train.timing import StepClock
from lockstep.train.under_way import StepsUnderWay, located


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
        under_way: the steps that a GPU may still be computing.
    """

    def __init__(self, strategy: Strategy, job: Job, *, callbacks: CallbackList, stop: AgreedStop) -> None:
        self._strategy = strategy
        self._job = job
        self._callbacks = callbacks
        self._stop = stop
        self._workers = strategy.workers
        self.epoch = self.batch = self.step = self.pending = 0
        self.loss = RunningLoss()
        self.under_way = StepsUnderWay()
        self.metrics = ReplicaMetrics.on(strategy, job.config.metrics)
        self._states = PerReplica([ReplicaState(metrics) for metrics in self.metrics.per_replica])
        strategy.run(clear_gradients, (job, self._states))
        self._steps = TrainSteps(strategy, job, self._states)
        self._looked = False
        if job.optimizer is not None:
            job.optimizer.forgive()

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
                self.metrics.trust_inputs()
                clock.stop(rows=rows)
                self._tell()
                if self._stop.after_batch():
                    break
                clock.start()
        if self.pending:
            self._finish_cycle()
        self._settle(clock)
        self.epoch, self.batch = self.epoch + 1, 0
        clock.examples = self._end_of_epoch(clock.examples)
        return {"loss": self.loss.final(), **self.metrics.compute()}

    def _train(self, batch: Any) -> int:
        """A step of every replica, and the update if it is due; the rows of the local ones."""
        if self._callbacks.wants_batch_logs():
            self._workers.wish(Wish.LOGS)
        due = (self.batch + 1) % self._job.config.accumulate == 0
        with located(self.epoch, self.batch + 1), self._looking():
            outputs = self._steps.run(batch, due, epoch=self.epoch)
        self._after_update(outputs[0].update)
        self._count(outputs, outputs[0].update)
        self.batch, self.step = self.batch + 1, self.step + 1
        self.pending = 0 if due else self.pending + 1
        return sum(output.rows for output in outputs)

    def _looking(self) -> AbstractContextManager[None]:
        """What the first step of this loop is run in."""
        if self._looked:
            return nullcontext()
        self._looked = True
        return telling_of_state(self._job.config.loss, self._strategy.num_replicas_in_sync)

    def _tell(self) -> None:
        """Tells the callbacks of a batch that is done, of its metrics too where those of some worker show them."""
        if self._workers.alone or self.pending:  # an update of several workers has told their wishes already
            self._workers.exchange("end of a batch")
        wishes = self._workers.granted
        names, metrics = self.metrics.begin_compute() if Wish.LOGS in wishes else ([], NO_NUMBERS)
        self._callbacks.call("on_train_batch_end", self.batch - 1, logs=batch_logs(self.loss.now(), names, metrics))
        self._workers.settle(wishes & ~Wish.STOP)

    def _finish_cycle(self) -> None:
        """The update of the batches that the end of the epoch has cut off from the rest of their cycle."""
        with located(self.epoch, self.batch):
            results = self._strategy.run(finish_cycle, (self._job, self._states))
        update = self._strategy.local_results(results)[0]
        self._after_update(update)
        self._count((), update)
        self.pending = 0

    def _count(self, outputs: Sequence[StepOutput], update: StepResult | None) -> None:
        """Adds a step to the loss. With several workers it is the update that knows the sums of all replicas."""
        if self._workers.alone:
            sums = [number for output in outputs for number in (output.total, output.count)]
        else:
            sums = [] if update is None else [update.total, update.count]
        # On their way to the host from here on, with the total that says whether the update was one.
        numbers = Arriving([*sums, 0.0 if update is None else update.total], self._strategy.devices[0])
        self.loss.add(numbers, pairs=len(sums) // 2)
        self.under_way.add(numbers, epoch=self.epoch, step=self.batch + bool(outputs))

    def _settle(self, clock: StepClock) -> None:
        """Waits for the device, if steps are under way there still: what that takes is the last step's."""
        if self.under_way.any:
            clock.start()
            self.under_way.settle()
            clock.extend()

    def _end_of_epoch(self, rows: int) -> int:
        """The rows of all workers; a check that all have the same weights still; a stop wished after the last batch."""
        if self._workers.alone:
            return rows
        self._job.module.compare_weights()
        self._job.module.exchange_buffers()
        everyones = self._workers.exchange("end of an epoch", [rows])
        self._stop.heard()
        return int(sum(each for (each,) in everyones))

    def _after_update(self, update: StepResult | None) -> None:
        """Steps the schedule, but for an update that the host knows to be skipped.

        Where a GPU decides it alone (an fp16 overflow, a batch that counts nothing) the schedule goes on: it follows
        the batches then, and does not hang on when the host came to hear of it.
        """
        if self._job.scheduler is not None and update is not None and update.skipped is not True:
            self._job.scheduler.step()
