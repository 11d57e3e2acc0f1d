"""LambdaCallback: hooks from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback

Hook = Callable[..., Any]


class LambdaCallback(Callback):
    """A callback made of functions: any hook of ``Callback``, with Keras's names and arguments.

    Args:
        on_epoch_begin: called with (epoch, logs).
        on_epoch_end: called with (epoch, logs).
        on_train_begin: called with (logs).
        on_train_end: called with (logs).
        on_train_batch_begin: called with (batch, logs).
        on_train_batch_end: called with (batch, logs).
        on_batch_begin: the older name of ``on_train_batch_begin``.
        on_batch_end: the older name of ``on_train_batch_end``.
        on_test_begin: called with (logs).
        on_test_end: called with (logs).
        on_test_batch_begin: called with (batch, logs).
        on_test_batch_end: called with (batch, logs).
        on_predict_begin: called with (logs).
        on_predict_end: called with (logs).
        on_predict_batch_begin: called with (batch, logs).
        on_predict_batch_end: called with (batch, logs).

    Raises:
        ConfigError: what is no function, or one hook under both of its names.

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
        *,
        on_batch_begin: Hook | None = None,
        on_batch_end: Hook | None = None,
        on_test_begin: Hook | None = None,
        on_test_end: Hook | None = None,
        on_test_batch_begin: Hook | None = None,
        on_test_batch_end: Hook | None = None,
        on_predict_begin: Hook | None = None,
        on_predict_end: Hook | None = None,
        on_predict_batch_begin: Hook | None = None,
        on_predict_batch_end: Hook | None = None,
    ) -> None:
        super().__init__()
        self._take(on_epoch_begin=on_epoch_begin, on_epoch_end=on_epoch_end)
        self._take(on_train_begin=on_train_begin, on_train_end=on_train_end)
        self._take(on_train_batch_begin=on_train_batch_begin, on_batch_begin=on_batch_begin)
        self._take(on_train_batch_end=on_train_batch_end, on_batch_end=on_batch_end)
        self._take(on_test_begin=on_test_begin, on_test_end=on_test_end)
        self._take(on_test_batch_begin=on_test_batch_begin, on_test_batch_end=on_test_batch_end)
        self._take(on_predict_begin=on_predict_begin, on_predict_end=on_predict_end)
        self._take(on_predict_batch_begin=on_predict_batch_begin, on_predict_batch_end=on_predict_batch_end)
        for end in ("begin", "end"):
            if {f"on_batch_{end}", f"on_train_batch_{end}"} <= vars(self).keys():
                raise ConfigError(
                    f"LambdaCallback got on_train_batch_{end} and on_batch_{end}, its older name; give one of them"
                )
        self._wants_batch_logs = not {"on_batch_end", "on_train_batch_end"}.isdisjoint(vars(self))

    def wants_batch_logs(self) -> bool:
        """Whether ``on_train_batch_end`` was given, by either name."""
        return self._wants_batch_logs

    def _take(self, **hooks: Hook | None) -> None:
        for name, hook in hooks.items():
            if hook is None:
                continue
            if not callable(hook):
                raise ConfigError(f"LambdaCallback({name}={hook!r}) is no function; give one, or leave it out")
            setattr(self, name, hook)
