"""Refuses to go on from a backup of a run with other settings, whose numbers would be those of neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.train.callbacks import Callback


class SameRun(Callback):
    """Takes the settings of a run into its checkpoints, and compares them where a run goes on from one.

    Args:
        settings: name -> number, text or None of everything that the numbers of the run depend on.

    Example:
        >>> callback = SameRun({"batch_size": 128, "seed": 0})
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = dict(settings)

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
