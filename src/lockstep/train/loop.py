"""The training loop over the batches of an epoch. It runs in the caller's thread, outside the replicas.

Model.fit -> run_fit -> TrainLoop.run_epoch -> strategy.run -> train_step, in each replica
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import NamedTuple, Protocol

from lockstep.collectives.communicator import Communicator, ControlFlags
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.optim.step import StepResult, check_finite
from lockstep.replicas.device.driver import NO_SCALARS, AsyncScalars
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.steps import GraphedSteps
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.logs import RunningLoss, StepClock, batch_logs
from lockstep.train.loss import warning_of_loss_state
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.step import ReplicaState, StepOutput, clear_gradients, finish_cycle, train_step

MOST_AHEAD = 2
"""How many steps the loop may be ahead of the last step whose numbers it has read.

With two steps queued a GPU never waits for the host. More would gain nothing, and their batches would fill its memory.
"""


class _Step(NamedTuple):
    numbers: AsyncScalars
    epoch: int
    step: int


class StepsInFlight:
    """The steps whose numbers have not been read from the device yet. On a CPU there are none."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, numbers: AsyncScalars, *, epoch: int, step: int) -> None:
        """Adds a step, and checks the losses of those that have arrived or are ``MOST_AHEAD`` steps behind.

        Args:
            numbers: the last one is the total loss of the step's update, or 0.
            epoch: counted from 0, for the error.
            step: the step of the epoch, counted from 1, for the error.

        Raises:
            NonFiniteLossError: the total loss of one of the last three steps is NaN or infinite. The weights are those
                before that update.
        """
        self._steps.append(_Step(numbers, epoch, step))
        while self._steps and (len(self._steps) > MOST_AHEAD or self._steps[0].numbers.arrived):
            self._check_first()

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._steps)

    def settle(self) -> None:
        """Waits for all steps and checks their losses.

        Raises:
            NonFiniteLossError: as ``add``.
        """
        while self._steps:
            self._check_first()

    def _check_first(self) -> None:
        first = self._steps.popleft()
        with naming_step(first.epoch, first.step):
            check_finite(first.numbers.read()[-1])


@contextmanager
def naming_step(epoch: int, step: int) -> Iterator[None]:
    """Puts the epoch, given from 0, and the step, given from 1, into the message of a NonFiniteLossError."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error}") from error


class Stoppable(Protocol):
    """What has a ``stop_training`` that callbacks set: the Model."""

    stop_training: bool


class AgreedStop:
    """Whether fit ends early: all workers end after the same batch, whichever of them asked for it.

    With one worker, ``model.stop_training = True`` ends fit after the current batch. With several, a worker that sets
    it sends the wish with the next exchange, and all end after that batch.

    Args:
        workers: the workers of the fit.
        model: its ``stop_training`` is read, and set on all workers once one has asked.
    """

    def __init__(self, workers: Communicator, model: Stoppable) -> None:
        self._workers = workers
        self._model = model
        workers.clear_flags(ControlFlags.STOP)  # left by a fit that failed before it could end

    def after_batch(self) -> bool:
        """Whether to end after this batch. Exchanges nothing."""
        if self._workers.is_single:
            return self._model.stop_training
        if self.received():
            return True
        self._send()
        return False

    def received(self) -> bool:
        """Whether the last exchange brought a worker's wish to stop. Every worker must call it at the same point."""
        if ControlFlags.STOP not in self._workers.agreed_flags:
            return False
        self._workers.clear_flags(ControlFlags.STOP)
        self._model.stop_training = True
        return True

    def agreed(self, place: str) -> bool:
        """Whether to end at ``place``, after an exchange if there are several workers. Every worker must call it."""
        if not self._workers.is_single:
            self._send()
            self._workers.all_gather_numbers(place)
            self.received()
        return self._model.stop_training

    def _send(self) -> None:
        if self._model.stop_training:
            self._workers.set_flags(ControlFlags.STOP)


class TrainLoop:
    """Trains epochs on one strategy.

    Args:
        strategy: the strategy that runs the steps.
        setup: what the replicas share.
        callbacks: called for every batch.
        stop: asked after each batch.

    Attributes:
        epoch: the current or next epoch, counted from 0.
        batch: how many global batches of the epoch are done.
        step: how many global batches are done over all epochs.
        pending: how many of the last batches wait for their update.
        loss: the loss of the epoch so far.
        metrics: the metrics of the epoch so far.
        in_flight: the steps that a GPU may still be computing.
    """

    def __init__(self, strategy: Strategy, setup: TrainSetup, *, callbacks: CallbackList, stop: AgreedStop) -> None:
        self._strategy = strategy
        self._setup = setup
        self._callbacks = callbacks
        self._stop = stop
        self._workers = strategy.workers
        self.epoch = self.batch = self.step = self.pending = 0
        self.loss = RunningLoss()
        self.in_flight = StepsInFlight()
        self.metrics = ReplicaMetrics.on(strategy, setup.config.metrics)
        self._states = PerReplica([ReplicaState(metrics) for metrics in self.metrics.per_replica])
        self._first_step = True
        strategy.run(clear_gradients, (setup, self._states))
        self._graphs = GraphedSteps.create(strategy, setup, self._states)
        if setup.optimizer is not None:
            setup.optimizer.reset_nonfinite()

    def run_epoch(self, data: EpochIterator, clock: StepClock) -> dict[str, float]:
        """Runs one epoch, with an update per ``accumulate`` global batches and one for those left at the end.

        If a checkpoint was loaded, the epoch goes on after the batches that are done.

        Returns:
            The loss and the metrics of the epoch.

        Raises:
            NonFiniteLossError: the loss became NaN or infinite. The weights are those of the last good update.
        """
        if not self.batch:
            self.loss = RunningLoss()
            self.metrics.reset()
        clock.start()
        with closing(data.epoch(self.epoch, skip=self.batch)) as batches:
            for batch in batches:
                clock.pause()
                self._callbacks.call("on_train_batch_begin", self.batch)
                clock.start()
                if self._callbacks.wants_batch_logs():
                    self._workers.set_flags(ControlFlags.LOGS)
                due = (self.batch + 1) % self._setup.config.accumulate == 0
                with naming_step(self.epoch, self.batch + 1), self._watching_loss():
                    if self._graphs is None:
                        results = self._strategy.run(train_step, (self._setup, self._states, batch, due))
                        outputs = self._strategy.local_results(results)
                    else:
                        outputs = self._graphs.run(batch, due, epoch=self.epoch)
                self._end_step(outputs, due)
                self.metrics.skip_input_checks()
                clock.stop(rows=sum(output.rows for output in outputs))
                self._report_batch()
                if self._stop.after_batch():
                    break
                clock.start()
        if self.pending:
            self._finish_cycle()
        if self.in_flight.any:
            clock.start()
            self.in_flight.settle()
            clock.extend()
        self.epoch, self.batch = self.epoch + 1, 0
        clock.examples = self._sync_workers(clock.examples)
        return {"loss": self.loss.final(), **self.metrics.compute()}

    def _watching_loss(self) -> AbstractContextManager[None]:
        first, self._first_step = self._first_step, False
        if not first:
            return nullcontext()
        return warning_of_loss_state(self._setup.config.loss, self._strategy.num_replicas_in_sync)

    def _end_step(self, outputs: Sequence[StepOutput], due: bool) -> None:
        self._step_scheduler(outputs[0].update)
        self._count(outputs, outputs[0].update)
        self.batch, self.step = self.batch + 1, self.step + 1
        self.pending = 0 if due else self.pending + 1

    def _report_batch(self) -> None:
        """Calls ``on_train_batch_end``, with metrics if a callback of some worker wants them."""
        if self._workers.is_single or self.pending:  # with several workers an update has exchanged the wishes already
            self._workers.all_gather_numbers("end of a batch")
        wishes = self._workers.agreed_flags
        names, metrics = self.metrics.begin_compute() if ControlFlags.LOGS in wishes else ([], NO_SCALARS)
        self._callbacks.call("on_train_batch_end", self.batch - 1, logs=batch_logs(self.loss.now(), names, metrics))
        self._workers.clear_flags(wishes & ~ControlFlags.STOP)

    def _finish_cycle(self) -> None:
        """Updates with the gradients of an accumulation cycle that the end of the epoch cut short."""
        with naming_step(self.epoch, self.batch):
            results = self._strategy.run(finish_cycle, (self._setup, self._states))
        update = self._strategy.local_results(results)[0]
        self._step_scheduler(update)
        self._count((), update)
        self.pending = 0

    def _count(self, outputs: Sequence[StepOutput], update: StepResult | None) -> None:
        """Adds a step to the loss. With several workers only the update has the sums over all replicas."""
        if self._workers.is_single:
            sums = [number for output in outputs for number in (output.total, output.count)]
        else:
            sums = [] if update is None else [update.total, update.count]
        # The copy to the host starts here. The last number is the update's total, which is checked for NaN.
        numbers = AsyncScalars([*sums, 0.0 if update is None else update.total], self._strategy.devices[0])
        self.loss.add(numbers, pairs=len(sums) // 2)
        self.in_flight.add(numbers, epoch=self.epoch, step=self.batch + bool(outputs))

    def _sync_workers(self, rows: int) -> int:
        """At the end of an epoch: compares the weights of the workers, averages buffers, and sums the rows."""
        if self._workers.is_single:
            return rows
        self._setup.module.compare_weights()
        self._setup.module.exchange_buffers()
        gathered = self._workers.all_gather_numbers("end of an epoch", [rows])
        self._stop.received()
        return int(sum(each for (each,) in gathered))

    def _step_scheduler(self, update: StepResult | None) -> None:
        """Steps the scheduler, unless the host knows that the update was skipped.

        Where a GPU skips an update by itself (an fp16 overflow, or a batch that counts nothing) the scheduler is
        stepped all the same: the schedule must not depend on when the host learns of it.
        """
        if self._setup.scheduler is not None and update is not None and update.skipped is not True:
            self._setup.scheduler.step()
