"""Why a step is not recorded: an exception inside this package, a line in the log outside."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("lockstep")


class UnfitError(Exception):
    """Steps cannot be recorded; the message says why, and what to do where there is something. Never leaves fit."""


class Reasons:
    """Tells the log why steps are not recorded, each reason once."""

    def __init__(self) -> None:
        self._told: list[str] = []

    @property
    def told(self) -> tuple[str, ...]:
        """All reasons so far, in order."""
        return tuple(self._told)

    def tell(self, reason: str) -> None:
        """Logs a reason that has not been told before."""
        if reason not in self._told:
            self._told.append(reason)
            _LOG.info("no CUDA graphs of whole steps: %s", reason)
