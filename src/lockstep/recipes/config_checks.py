"""Refuses to go on from a backup of a run with other settings, whose numbers would be those of neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.callbacks import Callback


def at_least(name: str, value: int, least: int) -> None:
    """Refuses a number below ``least``."""
    if value < least:
        raise ConfigError(f"{name}={value} was given, expected at least {least}")


def between(name: str, value: int, least: int, most: int) -> None:
    """Refuses a whole number outside ``least`` to ``most``."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} was given, expected a whole number from {least} to {most}")


def positive(name: str, value: float | None) -> None:
    """Refuses what is not finite and above 0; None, for a setting that was left out, passes."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}={value} was given, expected a finite number above 0")


def share(name: str, value: float, *, most: float, open_below: bool = False) -> None:
    """Refuses a part of a whole outside 0 to ``most``; 0 itself too, where ``open_below``."""
    if not 0 <= value <= most or (open_below and value == 0):
        least = "a share above 0 and" if open_below else "a share from 0"
        raise ConfigError(f"{name}={value} was given, expected {least} up to {most}; 0.1 is one in ten")


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuses a word that is not known."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")


class SameRun(Callback):
    """Takes the settings of a run into its checkpoints, and compares them where a run goes on from one.

    Args:
        settings: gives name -> number, text or None of everything that the numbers of the run depend on. It is called
            when the first checkpoint is saved or restored: a run without any does not wait for hashes of its data.

    Example:
        >>> callback = SameRun(lambda: {"batch_size": 128, "seed": 0})
    """

    def __init__(self, settings: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._find = settings

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return dict(self._find())

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares those of the run that was saved with those of this one.

        Raises:
            CheckpointError: they differ; the message has both.
        """
        known = [name for name in self._settings if name in state]
        other = [name for name in known if state[name] != self._settings[name]]
        if other:
            then, now = (", ".join(f"{name}={where[name]!r}" for name in other) for where in (state, self._settings))
            raise CheckpointError(
                f"the backup is of a run with {then}, and this one has {now}; go on with the settings that it had, or "
                "begin anew in another folder"
            )


def settings_but(config: Any, names: Collection[str]) -> dict[str, Any]:
    """Name -> value of the fields of a recipe's config, but for those that may change where a run goes on."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in names}
