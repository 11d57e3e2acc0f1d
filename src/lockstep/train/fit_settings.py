"""The arguments of fit: checked on each worker, and compared between workers before they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lockstep.collectives.agreement import agree
from lockstep.collectives.workers import Workers
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.compile_config import CompileConfig
from lockstep.train.feed import Feed

Verbose = Literal[0, 1, 2]


def check_numbers(**numbers: tuple[Any, int]) -> None:
    """Refuses what is no whole number, or below the least that is given beside it.

    Raises:
        ConfigError: such a number.
    """
    for name, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r} was given, expected a whole number of at least {least}")


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
    workers: Workers, config: CompileConfig, feed: Feed, validation: Feed | None, numbers: Mapping[str, int]
) -> None:
    """Finds workers that were told to train in another way. Every worker must call it.

    Raises:
        ClusterError: a worker differs from the chief.
    """
    lines = [f"{name}={value}" for name, value in numbers.items()]
    lines += [f"steps={feed.steps}", f"validation steps={None if validation is None else validation.steps}"]
    lines += [f"accumulate={config.accumulate}", f"clip_norm={config.clip_norm}"]
    lines += [f"precision={config.precision}", f"metrics={list(config.metrics)}"]
    agree(workers, "how to train", lines)
