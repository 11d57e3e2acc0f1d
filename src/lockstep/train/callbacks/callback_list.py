"""The callbacks of one run, called in order. It is the one place that turns their exceptions into CallbackError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lockstep.errors import (
    CallbackError,
    CheckpointError,
    ClusterError,
    ConfigError,
    MissingExtraError,
    NonFiniteLossError,
)
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.late_logs import own_logs

if TYPE_CHECKING:
    from lockstep.train.model import Model


class CallbackList:
    """Calls a hook of every callback, in the order given but for those that come after the others.

    As a context manager it closes them all at the end.

    Args:
        callbacks: instances of Callback.
        model: handed to each callback.
        params: handed to each callback: "epochs", "steps", "verbose".

    Raises:
        ConfigError: an item is no Callback.
    """

    def __init__(self, callbacks: Sequence[Callback], *, model: Model, params: Mapping[str, Any]) -> None:
        for callback in callbacks:
            _check(callback)
        is_chief = model.strategy.workers.is_chief
        here = [callback for callback in callbacks if is_chief or not callback.chief_only]
        self._callbacks = tuple(sorted(here, key=lambda callback: callback.comes_after))
        for callback in self._callbacks:
            _guarded(callback, "set_params", dict(params))
            _guarded(callback, "set_model", model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The stack closes every callback even if one fails, and chains a failure to the error that ended the run.
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(partial(_guarded, callback, "close"))

    def wants_batch_logs(self) -> bool:
        """Whether any callback needs the metrics of this batch."""
        return any(_guarded(callback, "wants_batch_logs") for callback in self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """The callbacks' own states, by class and, from the second of a class on, number."""
        return {name: _guarded(callback, "state_dict") for name, callback in self._named()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the callbacks their states; those without one stay as they are."""
        for name, callback in self._named():
            if state.get(name):
                _guarded(callback, "load_state_dict", state[name])

    def _named(self) -> list[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        named: list[tuple[str, Callback]] = []
        for callback in self._callbacks:
            kind = type(callback).__name__
            seen[kind] += 1
            named.append((kind if seen[kind] == 1 else f"{kind} {seen[kind]}", callback))
        return named

    def call(self, hook: str, *args: Any, logs: Logs | None = None) -> None:
        """Calls the hook named ``hook``; each callback gets its own copy of the logs.

        Raises:
            CallbackError: a callback raised; the error names it and its hook, and its exception is the cause.
        """
        for callback in self._callbacks:
            _guarded(callback, hook, *args, own_logs(logs))


def _guarded(callback: Callback, hook: str, *args: Any) -> Any:
    method: Callable[..., Any] = getattr(callback, hook)
    try:
        return method(*args)
    except (CallbackError, MissingExtraError, CheckpointError, ClusterError, NonFiniteLossError):
        raise  # the others are no fault of the callback, and say themselves what to do
    except Exception as error:
        raise CallbackError(
            f"callback {type(callback).__name__}.{hook} raised {type(error).__name__}: {error}; "
            "correct the callback or leave it out"
        ) from error


def _check(callback: Any) -> None:
    if isinstance(callback, Callback):
        return
    what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
    raise ConfigError(f"callbacks holds {what}; give instances of lockstep.Callback")
