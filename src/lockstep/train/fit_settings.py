"""The arguments of fit: checked on each worker, and compared between workers before they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from lockstep.collectives.communicator import Workers, agree
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.compile_config import CompileConfig
from lockstep.train.feed import Feed

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


def agree_on_fit(workers: Workers, config: CompileConfig, feed: Feed, validation: Feed | None, epochs: Epochs) -> None:
    """Finds workers that were told to train in another way. Every worker must call it.

    Raises:
        ClusterError: a worker differs from the chief.
    """
    lines = [f"{name}={value}" for name, value in asdict(epochs).items()]
    lines += [f"steps={feed.steps}", f"validation steps={None if validation is None else validation.steps}"]
    lines += [f"accumulate={config.accumulate}", f"clip_norm={config.clip_norm}"]
    lines += [f"precision={config.precision}", f"metrics={list(config.metrics)}"]
    agree(workers, "how to train", lines)
