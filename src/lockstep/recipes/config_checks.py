"""Checks of a recipe's settings: of single values, and of a resumed run's settings against those of its backup."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.callbacks import Callback


def at_least(name: str, value: int, least: int) -> None:
    """Raises ConfigError for a number below ``least``."""
    if value < least:
        raise ConfigError(f"{name}={value} was given, expected at least {least}")


def between(name: str, value: int, least: int, most: int) -> None:
    """Raises ConfigError for an integer outside ``least`` to ``most``."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} was given, expected an integer from {least} to {most}")


def positive(name: str, value: float | None) -> None:
    """Raises ConfigError for a number that is not finite and above 0; None is allowed."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value} was given, expected a finite number above 0")


def fraction(name: str, value: float, *, most: float, above_zero: bool = False) -> None:
    """Raises ConfigError for a fraction outside 0 to ``most``, and with ``above_zero`` for 0 itself."""
    if not 0 <= value <= most or (above_zero and value == 0):
        expected = "a fraction above 0 and" if above_zero else "a fraction from 0"
        raise ConfigError(f"{name}={value} was given, expected {expected} up to {most}; 0.1 is one in ten")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError for a string that is not one of ``known``."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


class ResumeCheck(Callback):
    """Saves a run's settings in its checkpoints, and refuses to resume a run that had other settings.

    Args:
        settings: returns name -> number, string or None of everything that the results of the run depend on. It is
            called when the first checkpoint is saved or restored, so a run without checkpoints hashes no data.

    Example:
        >>> callback = ResumeCheck(lambda: {"batch_size": 128, "seed": 0})
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._find = settings

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return dict(self._find())

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings."""
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares the settings of the saved run with those of this run.

        Raises:
            CheckpointError: they differ; the message has both.
        """
        changed = [name for name, value in self._settings.items() if name in state and state[name] != value]
        if changed:
            saved, own = (", ".join(f"{name}={of[name]!r}" for name in changed) for of in (state, self._settings))
            raise CheckpointError(
                f"the backup is of a run with {saved}, and this run has {own}; resume with the saved settings, or start"
                " anew in another folder"
            )


def settings_except(config: Any, names: Collection[str]) -> dict[str, Any]:
    """Returns name -> value of the fields of a recipe's config, except those that may change when a run is resumed."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in names}
