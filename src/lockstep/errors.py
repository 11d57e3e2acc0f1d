"""The exceptions that lockstep raises on purpose.

A message says what was received, what was expected, and what to do. Each class also derives from the built-in exception
that a caller would expect to catch, so that ``except ValueError`` works as it does everywhere else. Where nobody
catches one, its traceback ends with the user's call. This module imports no other package but torch, and that only for
``DeviceMemoryError``, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.tracebacks import rendered_by_ipython, shorten_uncaught
from lockstep.transformers_names import note_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "CallbackError", "CheckpointError", "ClusterError", "CollectiveError", "ConfigError", "DataError",
    "DeviceMemoryError", "LockstepError", "MissingExtraError", "NonFiniteLossError", "ReplicaError", "UsageError",
]  # fmt: skip


class LockstepError(Exception):
    """The base class: ``except ls.errors.LockstepError`` catches all that this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """IPython calls it for the lines that it shows."""
        return rendered_by_ipython(self, LockstepError)


shorten_uncaught(LockstepError, note_of)


class ConfigError(LockstepError, ValueError):
    """A setting, an argument or a device specification cannot be used."""


class UsageError(LockstepError, RuntimeError):
    """A call in the wrong place or order, such as a cross-replica method called inside a replica."""


class DataError(LockstepError, ValueError):
    """Input data cannot be divided or used: an empty dataset, tensors of unequal length, an unreadable file."""


class MissingExtraError(LockstepError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class ReplicaError(LockstepError, RuntimeError):
    """A replica could not be run or did not stop."""


class CollectiveError(LockstepError, RuntimeError):
    """Replicas did not meet at the same collective; the message says which replica waits where."""


class ClusterError(LockstepError, RuntimeError):
    """A cluster is malformed or incomplete, or its workers disagree, fail or are lost.

    Attributes:
        exit_code: that of the process if nobody catches the error: 138 where this worker only ends because another one
            was lost or has failed, so that starting it again may help; else 1.
    """

    exit_code = 1


class CheckpointError(LockstepError, RuntimeError):
    """Weights or a checkpoint cannot be written, read, or fitted to the module."""


class NonFiniteLossError(LockstepError, ArithmeticError):
    """The loss became NaN or infinite; the message names the step. The weights are those of the last good update.

    Attributes:
        finding, advice: the two parts of the message, without the step.
    """

    def __init__(self, finding: str, advice: str = "") -> None:
        super().__init__(f"{finding}. {advice}" if advice else finding)
        self.finding, self.advice = finding, advice


class CallbackError(LockstepError, RuntimeError):
    """A callback raised; the message names it and its exception is the cause."""


if TYPE_CHECKING:

    class DeviceMemoryError(LockstepError, torch.OutOfMemoryError):
        """A step took more memory than its logical device's share allows."""

else:

    def __getattr__(name: str) -> object:
        if name != "DeviceMemoryError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import torch

        class DeviceMemoryError(LockstepError, torch.OutOfMemoryError):
            """A step took more memory than its logical device's share allows."""

            __module__ = "lockstep.errors"
            __qualname__ = "DeviceMemoryError"  # so that it can be pickled

        # ``setdefault``: two threads may both get here, and an exception must be of the one class that ``except``
        # names.
        return globals().setdefault(name, DeviceMemoryError)
