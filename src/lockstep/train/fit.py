"""One fit: its arguments, and the loop over its epochs.

Model.fit -> run_fit -> for each epoch: TrainLoop.run_epoch, then run_evaluation on the validation data
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.collectives.communicator import Communicator, check_agreement
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback, CallbackList
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.compile import CompileConfig, TrainSetup
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.inference import module_mode, run_evaluation
from lockstep.train.logs import StepClock
from lockstep.train.loop import AgreedStop, TrainLoop

if TYPE_CHECKING:
    from lockstep.train.model import Model

Verbose = Literal[0, 1, 2]


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Which epochs are trained, and which of them are validated.

    Args:
        epochs: the last epoch, counted from 1.
        initial_epoch: the first epoch, counted from 0.
        validation_freq: validate after every this many epochs.

    Raises:
        ConfigError: a value is not a whole number, or too small.
    """

    epochs: int = 1
    initial_epoch: int = 0
    validation_freq: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "initial_epoch" else 1
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} was given, expected a whole number of at least {least}")

    def validates(self, epoch: int) -> bool:
        """Whether this epoch, counted from 0, ends with a validation."""
        return (epoch + 1) % self.validation_freq == 0


def with_progress(given: Sequence[Callback] | None, verbose: Verbose) -> list[Callback]:
    """The given callbacks, and a progress bar if ``verbose`` asks for one and there is none among them.

    Raises:
        ConfigError: ``verbose`` is unknown, or the callbacks are not a list.
    """
    if verbose not in (0, 1, 2):
        raise ConfigError(f"verbose={verbose!r} is unknown; choose 0 (silent), 1 (a live line) or 2 (plain lines)")
    if isinstance(given, Callback):
        raise ConfigError(f"callbacks is a {type(given).__name__}; give a list, such as callbacks=[callback]")
    callbacks = list(given or ())
    if verbose and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(ProgressBar(verbose))
    return callbacks


def agree_on_fit(
    workers: Communicator, config: CompileConfig, data: EpochIterator, validation: EpochIterator | None, epochs: Epochs
) -> None:
    """Checks that all workers call fit with the same settings. Every worker must call it.

    Raises:
        ClusterError: a worker's settings differ from the chief's.
    """
    lines = [f"{name}={value}" for name, value in asdict(epochs).items()]
    lines += [f"steps={data.steps}", f"validation steps={None if validation is None else validation.steps}"]
    lines += [f"accumulate={config.accumulate}", f"clip_norm={config.clip_norm}"]
    lines += [f"precision={config.precision}", f"metrics={list(config.metrics)}"]
    check_agreement(workers, "how to train", lines)


def run_fit(
    model: Model,
    setup: TrainSetup,
    data: EpochIterator,
    *,
    validation: EpochIterator | None,
    callbacks: CallbackList,
    epochs: Epochs,
) -> None:
    """Trains, and keeps the model's history, clock and ``stop_training`` up to date. Every worker must call it.

    Args:
        model: the model that is trained.
        setup: with an optimizer.
        data: the training data; it is closed at the end.
        validation: evaluated at the end of epochs; None for no validation.
        callbacks: called at every hook.
        epochs: which epochs are trained and validated.
    """
    stop = AgreedStop(model.strategy.workers, model)
    loop = TrainLoop(model.strategy, setup, callbacks=callbacks, stop=stop)
    state = model.training_state.during_fit(loop, data, callbacks, epoch=epochs.initial_epoch)
    with module_mode(setup.module, training=True), closing(data), state:
        callbacks.call("on_train_begin")
        logs: dict[str, float] = {}
        # A callback may have restored a later epoch, or a training that had been stopped.
        stopped = stop.agreed("beginning of the epochs")
        for epoch in range(loop.epoch, loop.epoch if stopped else epochs.epochs):
            callbacks.call("on_epoch_begin", epoch)
            model.clock = StepClock()
            logs = loop.run_epoch(data, model.clock)
            if validation is not None and epochs.validates(epoch):
                validated = run_evaluation(model.strategy, setup, validation, callbacks=callbacks, clock=StepClock())
                logs |= {f"val_{name}": value for name, value in validated.items()}
            model.history.timing.append(model.clock.summary(epoch))
            model.history.add(epoch, logs)
            callbacks.call("on_epoch_end", epoch, logs=logs)
            if stop.agreed("end of an epoch's callbacks"):
                break
        callbacks.call("on_train_end", logs=logs)
