"""The exception tree: every error that lockstep raises on purpose.

A message says what was received, what was expected, and what to do. Each class also derives from the built-in
exception that a caller would expect to catch, so that ``except ValueError`` works as it does everywhere else.
This room imports no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.errors.device_memory import DeviceMemoryError

__all__ = [
    "CallbackError",
    "CheckpointError",
    "ClusterError",
    "CollectiveError",
    "ConfigError",
    "DataError",
    "DeviceMemoryError",
    "LockstepError",
    "MissingExtraError",
    "NonFiniteLossError",
    "ReplicaError",
    "UsageError",
]


class LockstepError(Exception):
    """The root: ``except ls.errors.LockstepError`` catches all that this package raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting, an argument or a device specification that cannot be used."""


class UsageError(LockstepError, RuntimeError):
    """A call in the wrong place or order, such as a cross-replica method called inside a replica."""


class DataError(LockstepError, ValueError):
    """Input data that cannot be divided or used: an empty data set, tensors of unequal length, an unreadable file."""


class MissingExtraError(LockstepError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class ReplicaError(LockstepError, RuntimeError):
    """A replica could not be run or did not stop."""


class CollectiveError(LockstepError, RuntimeError):
    """Replicas did not meet at the same collective; the message says which replica waits where."""


class ClusterError(LockstepError, RuntimeError):
    """A cluster that is malformed, incomplete, or whose workers disagree."""


class CheckpointError(LockstepError, RuntimeError):
    """Weights or a checkpoint that cannot be written, read, or fitted to the module."""


class NonFiniteLossError(LockstepError, ArithmeticError):
    """The loss became NaN or infinite; the step is named and the weights are those of the last good update."""


class CallbackError(LockstepError, RuntimeError):
    """A callback raised; the message names it and its cause is attached."""


if not TYPE_CHECKING:  # which takes a module that has this for one that has every name

    def __getattr__(name: str) -> object:
        if name != "DeviceMemoryError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = import_module("lockstep.errors.device_memory").DeviceMemoryError
        return found
