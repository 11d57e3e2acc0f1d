"""LambdaCallback: hooks from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.train.callbacks.base import Callback

Hook = Callable[..., Any]


class LambdaCallback(Callback):
    """A callback made of functions, with Keras's names and arguments.

    Args:
        on_epoch_begin: called with (epoch, logs).
        on_epoch_end: called with (epoch, logs).
        on_train_begin: called with (logs).
        on_train_end: called with (logs).
        on_train_batch_begin: called with (batch, logs).
        on_train_batch_end: called with (batch, logs).

    Example:
        >>> callback = LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    """

    def __init__(
        self,
        on_epoch_begin: Hook | None = None,
        on_epoch_end: Hook | None = None,
        on_train_begin: Hook | None = None,
        on_train_end: Hook | None = None,
        on_train_batch_begin: Hook | None = None,
        on_train_batch_end: Hook | None = None,
    ) -> None:
        super().__init__()
        self._wants_batch_logs = on_train_batch_end is not None
        given = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        for name, hook in given.items():
            if hook is not None:
                setattr(self, name, hook)

    def wants_batch_logs(self) -> bool:
        """Whether ``on_train_batch_end`` was given."""
        return self._wants_batch_logs
