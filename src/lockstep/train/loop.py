"""The training loop over batches, outside the replicas.

run_fit -> TrainLoop.run_epoch -> strategy.run -> train_step (in each replica): forward, backward, update
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

from lockstep.collectives.communicator import Communicator, ControlFlags
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.optim.nonfinite import check_finite
from lockstep.mirroring.optim.step import StepResult
from lockstep.replicas.device.async_scalars import NO_SCALARS, AsyncScalars
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.steps import GraphedSteps
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.logs import RunningLoss, StepClock, batch_logs
from lockstep.train.loss import warning_of_loss_state
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.step import ReplicaState, StepOutput, clear_gradients, finish_cycle

MOST_AHEAD = 2
"""Steps after one whose numbers have not been read."""


class _Step(NamedTuple):
    numbers: AsyncScalars
    epoch: int
    step: int


class StepsInFlight:
    """The last steps of a pass, at most two of which have not been heard of."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, numbers: AsyncScalars, *, epoch: int, step: int) -> None:
        """Notes a step, and reads those that have arrived, or that are too far behind.

        Args:
            numbers: the last is the total of its update, or 0.
            epoch: from 0, for the error.
            step: of the epoch, from 1, for the error.

        Raises:
            NonFiniteLossError: the total of an update of one of the last three steps is NaN or infinite; the weights
                are those before that update.
        """
        self._steps.append(_Step(numbers, epoch, step))
        while self._steps and (len(self._steps) > MOST_AHEAD or self._steps[0].numbers.arrived):
            self._hear()

    @property
    def any(self) -> bool:
        """Whether there are steps that have not been heard of."""
        return bool(self._steps)

    def settle(self) -> None:
        """Hears of all steps. Waits for the device.

        Raises:
            NonFiniteLossError: as ``add``.
        """
        while self._steps:
            self._hear()

    def _hear(self) -> None:
        told = self._steps.popleft()
        with naming_step(told.epoch, told.step):
            check_finite(told.numbers.read()[-1])


@contextmanager
def naming_step(epoch: int, step: int) -> Iterator[None]:
    """Says in which epoch, from 0, and which step of it, from 1, the loss was not finite."""
    try:
        yield
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"epoch {epoch + 1}, step {step}: {error}") from error


class Stoppable(Protocol):
    """What callbacks set to end a fit: the Model."""

    stop_training: bool


class AgreedStop:
    """Whether a fit ends early. Its answers are the same on every worker, and so is ``model.stop_training`` after them.

    Args:
        workers: of the fit. All of them have met since the fit before this one.
        model: whose ``stop_training`` callbacks set, each on its own worker.
    """

    def __init__(self, workers: Communicator, model: Stoppable) -> None:
        self._workers = workers
        self._model = model
        workers.clear_flags(ControlFlags.STOP)  # of a fit that failed before it could end

    def after_batch(self) -> bool:
        """Whether all end here. Nothing is exchanged: one of several workers only wishes it, for the batch after."""
        if self._workers.is_single:
            return self._model.stop_training
        if self.heard():
            return True
        self._wish()
        return False

    def heard(self) -> bool:
        """Whether an exchange has told of a worker that would stop. Every worker must call it at the same point."""
        if ControlFlags.STOP not in self._workers.agreed_flags:
            return False
        self._workers.clear_flags(ControlFlags.STOP)
        self._model.stop_training = True
        return True

    def agreed(self, place: str) -> bool:
        """Whether all end at ``place``; several workers exchange it. Every worker must call it."""
        if not self._workers.is_single:
            self._wish()
            self._workers.all_gather_numbers(place)
            self.heard()
        return self._model.stop_training

    def _wish(self) -> None:
        if self._model.stop_training:
            self._workers.set_flags(ControlFlags.STOP)


class TrainLoop:
    """Trains epochs on one strategy.

    Args:
        strategy: runs the steps.
        setup: what the replicas share.
        callbacks: hear of every batch.
        stop: asked after each batch.

    Attributes:
        epoch: the epoch that is under way or comes next, from 0.
        batch: how many of its global batches are done.
        step: how many global batches are done in all.
        pending: how many of the last ones wait for their update.
        loss: of the epoch so far.
        metrics: of the epoch so far.
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
        strategy.run(clear_gradients, (setup, self._states))
        self._steps = GraphedSteps(strategy, setup, self._states)
        self._looked = False
        if setup.optimizer is not None:
            setup.optimizer.reset_nonfinite()

    def run_epoch(self, feed: EpochIterator, clock: StepClock) -> dict[str, float]:
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
                self.metrics.skip_input_checks()
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
            self._workers.set_flags(ControlFlags.LOGS)
        due = (self.batch + 1) % self._setup.config.accumulate == 0
        with naming_step(self.epoch, self.batch + 1), self._looking():
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
        return warning_of_loss_state(self._setup.config.loss, self._strategy.num_replicas_in_sync)

    def _tell(self) -> None:
        """Tells the callbacks of a batch that is done, of its metrics too where those of some worker show them."""
        if self._workers.is_single or self.pending:  # an update of several workers has told their wishes already
            self._workers.all_gather_numbers("end of a batch")
        wishes = self._workers.agreed_flags
        names, metrics = self.metrics.begin_compute() if ControlFlags.LOGS in wishes else ([], NO_SCALARS)
        self._callbacks.call("on_train_batch_end", self.batch - 1, logs=batch_logs(self.loss.now(), names, metrics))
        self._workers.clear_flags(wishes & ~ControlFlags.STOP)

    def _finish_cycle(self) -> None:
        """The update of the batches that the end of the epoch has cut off from the rest of their cycle."""
        with naming_step(self.epoch, self.batch):
            results = self._strategy.run(finish_cycle, (self._setup, self._states))
        update = self._strategy.local_results(results)[0]
        self._after_update(update)
        self._count((), update)
        self.pending = 0

    def _count(self, outputs: Sequence[StepOutput], update: StepResult | None) -> None:
        """Adds a step to the loss. With several workers it is the update that knows the sums of all replicas."""
        if self._workers.is_single:
            sums = [number for output in outputs for number in (output.total, output.count)]
        else:
            sums = [] if update is None else [update.total, update.count]
        # On their way to the host from here on, with the total that says whether the update was one.
        numbers = AsyncScalars([*sums, 0.0 if update is None else update.total], self._strategy.devices[0])
        self.loss.add(numbers, pairs=len(sums) // 2)
        self.in_flight.add(numbers, epoch=self.epoch, step=self.batch + bool(outputs))

    def _settle(self, clock: StepClock) -> None:
        """Waits for the device, if steps are under way there still: what that takes is the last step's."""
        if self.in_flight.any:
            clock.start()
            self.in_flight.settle()
            clock.extend()

    def _end_of_epoch(self, rows: int) -> int:
        """The rows of all workers; a check that all have the same weights still; a stop wished after the last batch."""
        if self._workers.is_single:
            return rows
        self._setup.module.compare_weights()
        self._setup.module.exchange_buffers()
        everyones = self._workers.all_gather_numbers("end of an epoch", [rows])
        self._stop.heard()
        return int(sum(each for (each,) in everyones))

    def _after_update(self, update: StepResult | None) -> None:
        """Steps the schedule, but for an update that the host knows to be skipped.

        Where a GPU decides it alone (an fp16 overflow, a batch that counts nothing) the schedule goes on: it follows
        the batches then, and does not hang on when the host came to hear of it.
        """
        if self._setup.scheduler is not None and update is not None and update.skipped is not True:
            self._setup.scheduler.step()
