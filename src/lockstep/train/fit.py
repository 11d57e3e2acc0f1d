"""One fit: its arguments, and the loops over its epochs and batches, in the caller's thread and outside the replicas.

Model.fit -> run_fit -> for each epoch: TrainLoop.run_epoch -> strategy.run -> train_step, in each replica
                                        run_evaluation on the validation data
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Literal

from lockstep.checks import check_number
from lockstep.collectives.communicator import Communicator, ControlFlags, check_agreement
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import NonFiniteLossError
from lockstep.mirroring.gradients.local_sum import Number
from lockstep.mirroring.gradients.parameter_hooks import warn_of_backward_hooks
from lockstep.mirroring.optim.update import StepResult
from lockstep.replicas.device.async_scalars import NO_SCALARS, AsyncScalars
from lockstep.train.callbacks.base import CallbackList
from lockstep.train.compile import CompileConfig, TrainSetup
from lockstep.train.cuda_graphs import GraphedSteps
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.inference import module_mode, run_evaluation
from lockstep.train.logs import LEARNING_RATE, RunningLoss, StepClock, batch_logs, naming_step
from lockstep.train.loss_totals import warning_of_loss_state
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.step import ReplicaState, StepOutput, train_step, update_weights
from lockstep.train.trained_model import TrainedModel

Verbose = Literal[0, 1, 2]
FitVerbose = Verbose | Literal["auto"]
"""``verbose`` of Model's methods; "auto", Keras's default, is 1."""


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Which epochs are trained, and which of them are validated: arguments of ``Model.fit``, which describes them."""

    epochs: int = 1
    initial_epoch: int = 0
    validation_freq: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "initial_epoch" else 1
            check_number(name, value, least=least, whole=True, optional=False)

    def trial(self) -> Epochs:
        """The first epoch alone, with validation."""
        return Epochs(epochs=self.initial_epoch + 1, initial_epoch=self.initial_epoch)


def batches_of_trial(fast_dev_run: bool | int) -> int | None:
    """How many batches ``fit(fast_dev_run=)`` trains and validates with; None for a whole training."""
    if fast_dev_run is False or fast_dev_run is True:
        return 1 if fast_dev_run else None
    check_number("fast_dev_run", fast_dev_run, least=1, whole=True, optional=False)
    return fast_dev_run


def agree_on_fit(
    workers: Communicator, config: CompileConfig, data: EpochIterator, validation: EpochIterator | None, epochs: Epochs
) -> None:
    """Raises a ClusterError if a worker's settings of fit differ from the chief's. Every worker must call it."""
    settings = {
        **asdict(epochs),
        "steps": data.steps,
        "validation steps": None if validation is None else validation.steps,
        **{name: getattr(config, name) for name in ("accumulate", "clip_norm", "precision")},
        "metrics": list(config.metrics),
    }
    check_agreement(workers, "how to train", [f"{name}={value}" for name, value in settings.items()])


def run_fit(
    model: TrainedModel,
    setup: TrainSetup,
    data: EpochIterator,
    *,
    validation: EpochIterator | None,
    callbacks: CallbackList,
    epochs: Epochs,
    during_fit: Callable[[TrainLoop], AbstractContextManager[None]],
) -> None:
    """Trains, and keeps the model's history, clock and ``stop_training`` up to date. Every worker must call it.

    ``during_fit`` makes the block in which the loop is a part of what a checkpoint saves and restores.
    """
    stop = AgreedStop(model)
    loop = TrainLoop(setup, callbacks, stop)
    with module_mode(setup.module, training=True), closing(data), during_fit(loop):
        callbacks.call("on_train_begin")
        logs: dict[str, float] = {}
        # A callback may have restored a later epoch, or a training that had been stopped.
        stopped = stop.agreed("beginning of the epochs")
        try:
            for epoch in range(loop.epoch, loop.epoch if stopped else epochs.epochs):
                callbacks.call("on_epoch_begin", epoch)
                model.clock = StepClock()
                logs = loop.run_epoch(data, model.clock)
                if validation is not None and (epoch + 1) % epochs.validation_freq == 0:
                    validated = run_evaluation(setup, validation, callbacks=callbacks, clock=StepClock())
                    logs |= {f"val_{name}": value for name, value in validated.items()}
                logs |= learning_rate_of(setup)
                model.history.timing.append(model.clock.summary(epoch))
                model.history.add(epoch, logs)
                callbacks.call("on_epoch_end", epoch, logs=logs)
                if stop.agreed("end of an epoch's callbacks"):
                    break
        except NonFiniteLossError as error:
            if not callbacks.ends_fit_after(error):
                raise
            model.stop_training = True
        callbacks.call("on_train_end", logs=logs)


def learning_rate_of(setup: TrainSetup) -> dict[str, float]:
    """The learning rate of the first group for the logs of an epoch; nothing for an optimizer that has none."""
    groups = [] if setup.optimizer is None else setup.optimizer.param_groups
    return {LEARNING_RATE: float(groups[0]["lr"])} if groups and "lr" in groups[0] else {}


class AgreedStop:
    """Whether fit ends early: all workers end after the same batch, whichever of them asked for it.

    With one worker, ``model.stop_training = True`` ends fit after the current batch. With several, the worker that sets
    it sends the request with the next exchange, and all end after that batch, with ``stop_training`` set.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._workers = model.strategy.workers
        self._workers.clear_flags(ControlFlags.STOP)  # left by a fit that failed before it could end

    def after_batch(self) -> bool:
        """Whether to end after this batch. Exchanges nothing."""
        if self._workers.is_single:
            return self._model.stop_training
        if self.received():
            return True
        self._send()
        return False

    def received(self) -> bool:
        """Whether the last exchange brought a request to stop. Every worker must call it at the same point."""
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

    Attributes:
        epoch, batch, step: the position, as in ``trained_model.Position``.
        pending: how many of the last batches wait for their update.
        loss, metrics: those of the epoch so far.
        grad_norm: the norm of the last update's gradients; None if there is no ``clip_norm``.
    """

    def __init__(self, setup: TrainSetup, callbacks: CallbackList, stop: AgreedStop) -> None:
        self._strategy, self._setup, self._callbacks, self._stop = setup.strategy, setup, callbacks, stop
        self._workers = setup.strategy.workers
        self.epoch = self.batch = self.step = self.pending = 0
        self.loss = RunningLoss()
        self.grad_norm: Number | None = None
        self.metrics = ReplicaMetrics(setup.strategy, setup.config.metrics)
        self._states = PerReplica([ReplicaState(metrics) for metrics in self.metrics.per_replica])
        replicas = setup.strategy.num_replicas_in_sync
        self._watching_loss: AbstractContextManager[None] = warning_of_loss_state(setup.config.loss, replicas)
        self._strategy.check_choice.begin_training(train_step)
        self._graphs = GraphedSteps.create(setup, self._states)
        self._looked_at_module = False
        if setup.optimizer is not None:
            setup.optimizer.zero_grad()
            setup.optimizer.reset_nonfinite()

    def run_epoch(self, data: EpochIterator, clock: StepClock) -> dict[str, float]:
        """Runs one epoch, or the rest of it, with an update per ``accumulate`` global batches and one for those left.

        Returns the loss and the metrics.
        """
        if not self.batch:
            self.loss = RunningLoss()
            self.metrics.reset()
        clock.start()
        with self._calling_hooks(), closing(data.epoch(self.epoch, skip=self.batch)) as batches:
            for batch in batches:
                # The time of callbacks is no time of the step (test_only_steps_are_timed).
                clock.pause()
                self._callbacks.call("on_train_batch_begin", self.batch)
                clock.start()
                if self._callbacks.wants_batch_logs():
                    # The flag travels with the exchange of the update, so that all workers compute metrics after the
                    # same step, whichever of them has a callback that asks.
                    self._workers.set_flags(ControlFlags.LOGS)
                due = (self.batch + 1) % self._setup.config.accumulate == 0
                # The first step alone: the state of the loss is compared before and after it.
                watching, self._watching_loss = self._watching_loss, nullcontext()
                with naming_step(self.epoch, self.batch + 1, batch), watching:
                    outputs = None if self._graphs is None else self._graphs.run(batch, epoch=self.epoch)
                    if outputs is None:
                        results = self._strategy.run(train_step, (self._setup, self._states, batch, due))
                        outputs = self._strategy.local_results(results)
                self._count(outputs, outputs[0].update)
                self.batch, self.step = self.batch + 1, self.step + 1
                self.pending = 0 if due else self.pending + 1
                self.metrics.skip_input_checks()
                clock.stop(rows=sum(output.rows for output in outputs))
                self._report_batch()
                if self._stop.after_batch():
                    break
                clock.start()
            if self.pending:
                self._finish_cycle()
        clock.start()
        # Waits for the device. The time is that of the last step, and not of the callbacks after it.
        self.loss.settle()
        clock.extend()
        self.epoch, self.batch = self.epoch + 1, 0
        clock.examples = self._sync_workers(clock.examples)
        return {"loss": self.loss.final(), **self.metrics.compute()}

    def _calling_hooks(self) -> AbstractContextManager[None]:
        """A block whose updates call the hooks on parameters, with the gradients that one device has."""
        optimizer, config = self._setup.optimizer, self._setup.config
        if optimizer is None:
            return nullcontext()
        if not self._looked_at_module:
            self._looked_at_module = True
            warn_of_backward_hooks(self._setup.module.module)
        refused = f"accumulate={config.accumulate} makes several backward passes" if config.accumulate > 1 else ""
        return optimizer.hooks_at_updates(refused or 'precision="fp16" scales losses' * (config.precision == "fp16"))

    def _report_batch(self) -> None:
        """Calls ``on_train_batch_end``, with metrics if a callback of some worker wants them."""
        if self._workers.is_single or self.pending:  # with several workers an update has exchanged the flags already
            self._workers.all_gather_numbers("end of a batch")
        flags = self._workers.agreed_flags
        names, metrics = self.metrics.begin_compute() if flags and ControlFlags.LOGS in flags else ([], NO_SCALARS)
        if self._callbacks:
            self._callbacks.call("on_train_batch_end", self.batch - 1, logs=batch_logs(self.loss.now(), names, metrics))
        if flags:
            self._workers.clear_flags(flags & ~ControlFlags.STOP)

    def _finish_cycle(self) -> None:
        """Updates with the gradients of an accumulation cycle that the end of the epoch cut short."""
        with naming_step(self.epoch, self.batch):
            results = self._strategy.run(update_weights, (self._setup, self._states))
        self._count((), self._strategy.local_results(results)[0])
        self.pending = 0

    def _count(self, outputs: Sequence[StepOutput], update: StepResult | None) -> None:
        """Steps the scheduler, and adds a step to the loss. With several workers or layouts only updates have sums."""
        if update is not None:
            self.grad_norm = update.grad_norm
            # Not after an update that the host knows was skipped. If a GPU skips one by itself, the schedule must not
            # depend on when the host learns of it.
            if self._setup.scheduler is not None and update.skipped is not True:
                self._setup.scheduler.step()
        if self._workers.is_single and not self._workers.any_layout:
            sums = [number for output in outputs for number in (output.total, output.count)]
        else:
            sums = [] if update is None else [update.total, update.count]
        # The copy to the host starts here. The last number is the update's total, which is checked for NaN.
        numbers = AsyncScalars([*sums, 0.0 if update is None else update.total], self._strategy.devices[0])
        self.loss.add(numbers, epoch=self.epoch, step=self.batch + bool(outputs))

    def _sync_workers(self, rows: int) -> int:
        """At the end of an epoch: compares the weights of the workers, averages buffers, and sums the rows."""
        if self._workers.is_single:
            return rows
        # Once an epoch: a worker whose weights have come apart, by a fault of memory or of the program, is named then.
        self._setup.module.compare_weights()
        self._setup.module.exchange_buffers()
        gathered = self._workers.all_gather_numbers("end of an epoch", [rows])
        self._stop.received()
        return int(sum(worker_rows for (worker_rows,) in gathered))
