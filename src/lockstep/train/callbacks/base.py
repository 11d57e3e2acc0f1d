"""The base class of callbacks: Keras's hooks and names, all doing nothing."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from lockstep.errors import (
    CallbackError,
    CheckpointError,
    ClusterError,
    ConfigError,
    MissingExtraError,
    NonFiniteLossError,
)
from lockstep.train.logs import copy_logs

if TYPE_CHECKING:
    from lockstep.train.model import Model


Logs = Mapping[str, float]
"""What hooks receive: plain numbers by name, such as ``{"loss": 0.3, "val_loss": 0.4}``; empty where there are none.

On a GPU the numbers of a batch are read when a hook looks at one: only then does the program wait for the device.
"""

_BATCH_END_HOOKS = ("on_train_batch_end", "on_batch_end")


class Callback:
    """Code that runs at set moments of fit, evaluate and predict, in the caller's thread and outside the replicas.

    Override the hooks you need. ``self.model`` is the Model and ``self.params`` a dict with "epochs", "steps" (None
    where unknown) and "verbose". Setting ``self.model.stop_training = True`` ends fit after the current batch; among
    several workers one of them is enough, and all end after the next.

    Example:
        >>> class Shout(Callback):
        ...     def on_epoch_end(self, epoch, logs):
        ...         print(epoch, logs["loss"])
    """

    #: Whether it has something to do on the chief alone, as what writes files or prints. Its hooks are not called on
    #: other workers, so it must not call anything that all workers have to call, such as ``model.state_dict()``.
    chief_only = False

    #: Callbacks with a higher number are called after those with a lower one, whatever their place in the list: what
    #: saves the state of others has to see what they have made of the hook.
    comes_after = 0

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self._model: Model | None = None

    @property
    def model(self) -> Model:
        """The Model that runs this callback; there is one from ``set_model`` on."""
        if self._model is None:
            raise AttributeError(f"{type(self).__name__} has no model yet; hand it to fit(callbacks=[...])")
        return self._model

    def set_params(self, params: dict[str, Any]) -> None:
        """Receives the parameters of the run before it begins."""
        self.params = params

    def set_model(self, model: Model) -> None:
        """Receives the Model before the run begins."""
        self._model = model

    def wants_batch_logs(self) -> bool:
        """Whether this batch's ``on_train_batch_end`` needs the metrics too, which cost a merge of all replicas.

        Without it the logs of a batch hold the loss alone. By default: whether the class overrides that hook.
        """
        return any(getattr(type(self), hook) is not getattr(Callback, hook) for hook in _BATCH_END_HOOKS)

    def state_dict(self) -> dict[str, Any]:
        """What the callback carries from epoch to epoch, for whole checkpoints: numbers, texts, tensors, containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave, after ``on_train_begin``, when a training goes on from a checkpoint."""

    def close(self) -> None:
        """Releases what the callback holds, such as files. Called at any end of a run, after an error or Ctrl-C too."""

    def on_train_begin(self, logs: Logs) -> None:
        """Called when fit begins."""

    def on_train_end(self, logs: Logs) -> None:
        """Called when fit ends by itself; not after an error."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Called before the first batch of an epoch; epochs count from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after an epoch and its validation, with the numbers of the whole epoch."""

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a global batch of fit; calls ``on_batch_begin`` unless overridden."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a global batch of fit, with the numbers of the epoch so far; calls ``on_batch_end``."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs) -> None:
        """The older name of ``on_train_batch_begin``."""

    def on_batch_end(self, batch: int, logs: Logs) -> None:
        """The older name of ``on_train_batch_end``."""

    def on_test_begin(self, logs: Logs) -> None:
        """Called when evaluate, or a validation inside fit, begins."""

    def on_test_end(self, logs: Logs) -> None:
        """Called when evaluate, or a validation inside fit, ends, with its results."""

    def on_test_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a global batch of evaluate or of a validation."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a global batch of evaluate or of a validation, with the loss so far."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Called when predict begins."""

    def on_predict_end(self, logs: Logs) -> None:
        """Called when predict ends."""

    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None:
        """Called before a global batch of predict."""

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after a global batch of predict."""


def given_path(path: Any, argument: str) -> str:
    """The path as a text.

    Args:
        path: a text or a ``pathlib.Path``.
        argument: its name in the message, such as "CSVLogger(filename)".

    Raises:
        ConfigError: it is empty, or no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{argument} is {path!r}; give the path of a file or folder")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{argument} is {text!r}, which names nothing; give a path, or '.' if the working directory is meant"
        )
    return text


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
            _guarded(callback, hook, *args, copy_logs(logs))


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
