"""Watching one number of the logs: which direction is better, what is progress, and what is said where it is absent.

Shared by EarlyStopping and ModelCheckpoint, so that both understand ``monitor`` and ``mode`` alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Logs

Mode = Literal["auto", "min", "max"]


class Monitor:
    """One name of the logs and what is better for it.

    Args:
        name: such as "val_loss".
        mode: "min", "max", or "auto": min for a loss, and what the metric of that name says of itself
            (torchmetrics' ``higher_is_better``).
        min_delta: a change smaller than this is no progress; its sign is ignored.
        owner: the callback's name, for messages.

    Raises:
        ConfigError: an unknown mode.
    """

    def __init__(self, name: str, *, mode: Mode, owner: str, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"{owner}(mode={mode!r}) is unknown; choose 'auto', 'min' or 'max'")
        self.name = name
        self._mode = mode
        self._owner = owner
        self._min_delta = abs(min_delta)
        self._maximise = {"max": True, "min": False}.get(mode)

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Settles what "auto" means, given the Model's metrics."""
        if self._mode != "auto":
            return
        plain = self.name.removeprefix("val_")
        self._maximise = False if plain == "loss" else getattr(metrics.get(plain), "higher_is_better", None)

    @property
    def direction(self) -> Literal["min", "max"] | None:
        """What is better; None where "auto" could not tell."""
        return None if self._maximise is None else ("max" if self._maximise else "min")

    def read(self, logs: Logs) -> float | None:
        """The monitored number; None, with a warning that lists the names that exist, where the logs lack it."""
        if self.name in logs:
            return logs[self.name]
        names = ", ".join(logs) or "none"
        warnings.warn(f"{self._owner} monitors {self.name!r}, which the logs lack; they have: {names}", stacklevel=2)
        return None

    def require(self, logs: Logs, *, validated: bool) -> float | None:
        """The monitored number; None in an epoch that was not validated, where it is a number of the validation.

        Args:
            logs: of an epoch.
            validated: whether some epochs of this fit are.

        Raises:
            ConfigError: the logs lack it; the message lists the names that exist.
        """
        if self.name in logs:
            return logs[self.name]
        if validated and self.name.startswith("val_") and self.name.removeprefix("val_") in logs:
            return None
        advice = "" if validated or not self.name.startswith("val_") else ", or give fit validation_data"
        raise ConfigError(
            f"{self._owner} monitors {self.name!r}, which the logs lack; they have: {', '.join(logs) or 'nothing'}. "
            f"Give one of these names as monitor{advice}"
        )

    def is_better(self, value: float, reference: float | None) -> bool:
        """Whether ``value`` beats ``reference`` by more than ``min_delta``; NaN beats nothing, all else beats None.

        Raises:
            ConfigError: mode is "auto" and the metric does not say which direction is better.
        """
        if self._maximise is None:
            raise ConfigError(
                f"{self._owner} cannot tell whether {self.name!r} is better high or low; give mode='max' or 'min'"
            )
        if math.isnan(value):
            return False
        if reference is None:
            return True
        return (value - reference if self._maximise else reference - value) > self._min_delta
