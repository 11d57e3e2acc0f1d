"""One fit: its epochs, each trained, validated, recorded and told of, up to the last one or an agreed end.

Model.fit -> run_fit -> TrainLoop.run_epoch, run_evaluation
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
    """Which epochs a fit trains, and which of them it validates.

    Args:
        epochs: the number of the last, counted from 1.
        initial_epoch: the first, counted from 0.
        validation_freq: validate after every this many.

    Raises:
        ConfigError: what is no whole number, or too small a one.
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
    """The callbacks that were given, and a progress bar where they have none and ``verbose`` asks for it.

    Raises:
        ConfigError: another ``verbose``, or a callback that is in no list.
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
    workers: Communicator, config: CompileConfig, feed: EpochIterator, validation: EpochIterator | None, epochs: Epochs
) -> None:
    """Finds workers that were told to train in another way. Every worker must call it.

    Raises:
        ClusterError: a worker differs from the chief.
    """
    lines = [f"{name}={value}" for name, value in asdict(epochs).items()]
    lines += [f"steps={feed.steps}", f"validation steps={None if validation is None else validation.steps}"]
    lines += [f"accumulate={config.accumulate}", f"clip_norm={config.clip_norm}"]
    lines += [f"precision={config.precision}", f"metrics={list(config.metrics)}"]
    check_agreement(workers, "how to train", lines)


def run_fit(
    model: Model,
    setup: TrainSetup,
    feed: EpochIterator,
    *,
    validation: EpochIterator | None,
    callbacks: CallbackList,
    epochs: Epochs,
) -> None:
    """Trains, and keeps the model's history, clock and ``stop_training``. Every worker must call it.

    Args:
        model: whose fit it is.
        setup: with an optimizer.
        feed: the training data; it is closed at the end.
        validation: evaluated at the end of epochs, if there is any.
        callbacks: hear of everything.
        epochs: which are trained, and which validated.
    """
    stop = AgreedStop(model.strategy.workers, model)
    loop = TrainLoop(model.strategy, setup, callbacks=callbacks, stop=stop)
    state = model.training_state.of_fit(loop, feed, callbacks, epoch=epochs.initial_epoch)
    with module_mode(setup.module, training=True), closing(feed), state:
        callbacks.call("on_train_begin")
        logs: dict[str, float] = {}
        # A callback may have restored a later epoch, or a training that was stopped.
        stopped = stop.agreed("beginning of the epochs")
        for epoch in range(loop.epoch, loop.epoch if stopped else epochs.epochs):
            callbacks.call("on_epoch_begin", epoch)
            model.clock = StepClock()
            logs = loop.run_epoch(feed, model.clock)
            if validation is not None and epochs.validates(epoch):
                validated = run_evaluation(model.strategy, setup, validation, callbacks=callbacks, clock=StepClock())
                logs |= {f"val_{name}": value for name, value in validated.items()}
            model.history.timing.append(model.clock.summary(epoch))
            model.history.add(epoch, logs)
            callbacks.call("on_epoch_end", epoch, logs=logs)
            if stop.agreed("end of an epoch's callbacks"):
                break
        callbacks.call("on_train_end", logs=logs)
