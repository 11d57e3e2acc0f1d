"""Refuses to go on from a backup of a run with other settings, whose numbers would be those of neither."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.train.callbacks import Callback


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
