"""The base class of callbacks, LambdaCallback, the list that calls them, and what several callbacks share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Self

from lockstep import console
from lockstep.checks import check_choice, check_number, shown
from lockstep.errors import (
    CallbackError,
    CheckpointError,
    ClusterError,
    ConfigError,
    MissingExtraError,
    NonFiniteLossError,
)
from lockstep.train.logs import LEARNING_RATE, copy_logs
from lockstep.train.summed_metric import SummedMetric
from lockstep.train.trained_model import TrainedModel

Logs = Mapping[str, float]
"""What hooks receive: numbers by name, such as ``{"loss": 0.3, "val_loss": 0.4}``; empty for hooks without numbers.

On a GPU, the program waits for the numbers of a batch only when a hook looks at one.
"""


class Callback:
    """Code that runs at set moments of fit, evaluate and predict, in the caller's thread and outside the replicas.

    Override the hooks you need. ``test`` hooks are those of evaluate and of validation inside fit. Epochs and batches
    count from 0. The logs of a batch are the numbers so far. ``on_train_end`` is not called after an error.

    ``self.model`` is the Model and ``self.params`` a dict with "epochs", "steps" (None if unknown) and "verbose".
    ``self.model.stop_training = True`` ends fit after the current batch; of several workers one may set it, and all end
    after the next batch.

    Example:
        >>> class Shout(Callback):
        ...     def on_epoch_end(self, epoch, logs):
        ...         print(epoch, logs["loss"])
    """

    #: Whether the hooks are called on the chief only, as for callbacks that write files or print. Such a callback must
    #: not call anything that all workers have to call, such as ``model.state_dict()``.
    chief_only = False

    #: Whether the callback writes files or to a run of a tracker: ``fit(fast_dev_run=True)`` leaves it out.
    writes_files = False

    #: Callbacks with a higher number come later, whatever their order. Those that save the state of others have one.
    comes_after = 0

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self._model: TrainedModel | None = None

    @property
    def model(self) -> TrainedModel:
        """The Model that runs this callback, once ``set_model`` was called."""
        if self._model is None:
            raise AttributeError(f"{type(self).__name__} has no model yet; hand it to fit(callbacks=[...])")
        return self._model

    def set_params(self, params: dict[str, Any]) -> None:
        """Called with the parameters of the run before it begins."""
        self.params = params

    def set_model(self, model: TrainedModel) -> None:
        """Called with the Model before the run begins."""
        self._model = model

    def wants_batch_logs(self) -> bool:
        """Whether this batch's logs need the metrics, merged over all replicas, beside the loss.

        By default: whether the class overrides ``on_train_batch_end``.
        """
        # Metrics are merged over all replicas and workers for these logs; a callback that does not listen to batches
        # must not cost that (test_only_who_listens_to_batches_wants_their_metrics).
        hooks = ("on_train_batch_end", "on_batch_end")
        return any(getattr(type(self), hook) is not getattr(Callback, hook) for hook in hooks)

    def ends_fit_after(self, error: NonFiniteLossError) -> bool:
        """Whether fit ends after a loss that is NaN or infinite, instead of raising this error."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What the callback keeps from epoch to epoch, for checkpoints: numbers, strings, tensors, and containers."""
        return {}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises a CheckpointError if this run cannot go on from what ``state_dict`` returned.

        Called before anything of a checkpoint is loaded, weights included, and before it is compared with the model.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned. Called after ``on_train_begin`` when a checkpoint is restored."""

    def expanded(self) -> Sequence[Callback]:
        """This callback, and others that a run calls after it, such as one that every worker needs."""
        return (self,)

    def exchanging(self, *, averaged: bool) -> AbstractContextManager[None]:
        """A block in which the model has averages of its weights, or the weights that are trained.

        Of a callback that averages weights, such as ``EMA``; others do nothing.
        """
        return nullcontext()

    def close(self) -> None:
        """Releases files and the like. Called at every end of a run, also after an error or Ctrl-C."""

    def _say(self, text: str) -> None:
        """Writes a line to standard output, on the chief."""
        if self.model.strategy.workers.leads:
            console.write_line(text)

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """Calls ``on_batch_begin``, its older name."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Calls ``on_batch_end``, its older name."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_train_begin(self, logs: Logs) -> None: ...
    def on_train_end(self, logs: Logs) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None: ...
    def on_epoch_end(self, epoch: int, logs: Logs) -> None: ...
    def on_test_begin(self, logs: Logs) -> None: ...
    def on_test_end(self, logs: Logs) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_predict_begin(self, logs: Logs) -> None: ...
    def on_predict_end(self, logs: Logs) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Logs) -> None: ...


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        **hooks: a function for each hook of ``Callback``, by its name, with the hook's arguments.

    Raises:
        ConfigError: a name is no hook, or its value no function.

    Example:
        >>> callback = LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()
        names = [name for name in vars(Callback) if name.startswith("on_") and not name.startswith("on_batch_")]
        self._hooks = {name: hook for name, hook in hooks.items() if hook is not None}
        for name, hook in self._hooks.items():
            if name not in names or not callable(hook):
                raise ConfigError(f"LambdaCallback({name}={hook!r}); give functions for some of {', '.join(names)}")
            setattr(self, name, hook)

    def wants_batch_logs(self) -> bool:
        return "on_train_batch_end" in self._hooks


class CallbackList:
    """The callbacks of one run, called in the given order, then by ``comes_after``. Closes them when its block ends.

    Each gets the model and ``params``. An exception of a callback becomes a CallbackError, here and nowhere else.
    """

    def __init__(self, callbacks: Sequence[Callback], *, model: TrainedModel, params: Mapping[str, Any]) -> None:
        instances: Sequence[Any] = callbacks
        for instance in instances:
            if not isinstance(instance, Callback):
                kind = (
                    f"the class {instance.__name__}" if isinstance(instance, type) else f"a {type(instance).__name__}"
                )
                raise ConfigError(f"callbacks holds {kind}; give instances of lockstep.Callback")
        leads = model.strategy.workers.leads  # an evaluator shows its own progress
        parts = [part for callback in callbacks for part in callback.expanded()]
        local_callbacks = [callback for callback in parts if leads or not callback.chief_only]
        self._callbacks = tuple(sorted(local_callbacks, key=lambda callback: callback.comes_after))
        for callback in self._callbacks:
            _call(callback, "set_params", dict(params))
            _call(callback, "set_model", model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The stack closes every callback even if one fails, and chains a failure to the error that ended the run.
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(partial(_call, callback, "close"))

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def wants_batch_logs(self) -> bool:
        """Whether any callback needs the metrics of this batch."""
        return any(_call(callback, "wants_batch_logs") for callback in self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """The state of each callback, by its class name, with a number from the second of a class on."""
        return {name: _call(callback, "state_dict") for name, callback in self._named()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises a CheckpointError if a callback cannot go on from its state."""
        self._pass_states("check_state_dict", state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the states. Callbacks without one stay as they are."""
        self._pass_states("load_state_dict", state)

    def _pass_states(self, method: str, state: Mapping[str, Any]) -> None:
        for name, callback in self._named():
            if state.get(name):
                _call(callback, method, state[name])

    @contextmanager
    def exchanging(self, *, averaged: bool) -> Iterator[None]:
        """A block in which the model has the averages of its weights, if a callback has some, or the trained ones."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.exchanging(averaged=averaged))
            yield

    def ends_fit_after(self, error: NonFiniteLossError) -> bool:
        """Whether any callback ends fit after a loss that is NaN or infinite."""
        return any(_call(callback, "ends_fit_after", error) for callback in self._callbacks)

    def call(self, hook: str, *args: Any, logs: Logs | None = None) -> None:
        """Calls a hook of every callback, each with its own copy of the logs."""
        for callback in self._callbacks:
            _call(callback, hook, *args, copy_logs(logs))

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            kind = type(callback).__name__
            counts[kind] += 1
            yield kind if counts[kind] == 1 else f"{kind} {counts[kind]}", callback


def _call(callback: Callback, hook: str, *args: Any) -> Any:
    method: Callable[..., Any] = getattr(callback, hook)
    try:
        return method(*args)
    except (CallbackError, MissingExtraError, CheckpointError, ClusterError, NonFiniteLossError):
        raise  # not the callback's fault; these errors say what to do
    except BrokenPipeError:
        raise  # who read what the program prints has left
    except Exception as error:
        raise CallbackError(
            f"callback {type(callback).__name__}.{hook} raised {type(error).__name__}: {error}; "
            "correct the callback or leave it out"
        ) from error


Mode = Literal["auto", "min", "max"]


class Monitor:
    """A name of the logs, such as "val_loss", that the callback ``owner`` monitors, and which direction is better.

    Args:
        mode: "min", "max", or "auto": min for a loss, else the metric's own ``higher_is_better``, as in torchmetrics.
        min_delta: a smaller change is no improvement; its sign is ignored.

    Attributes:
        direction: "min" or "max"; None if "auto" could not tell.
    """

    def __init__(self, name: str, *, mode: Mode, owner: str, min_delta: float = 0.0) -> None:
        if not isinstance(name, str):
            raise ConfigError(
                f"{owner}(monitor={shown(name)}); give the name of a number in the logs, such as 'val_loss'"
            )
        check_number(f"{owner}(min_delta)", min_delta, optional=False)
        check_choice(f"{owner}(mode)", mode, ("auto", "min", "max"))
        self.name = name
        self._mode, self._owner, self._min_delta = mode, owner, abs(min_delta)
        self.direction: Literal["min", "max"] | None = None if mode == "auto" else mode

    def begin(self, metrics: Mapping[str, Any], *, validated: bool | None) -> None:
        """Resolves "auto" with the Model's metrics, and checks the name before anything is trained.

        ``validated`` says whether some epochs of this fit are; None if that is not known.

        Raises:
            ConfigError: the logs will have no such name. A metric of torchmetrics may compute several values, whose
                names begin with its own and are known only later: such names pass.
        """
        if validated is not None:
            self._check_name(metrics, validated=validated)
        if self._mode == "auto":
            plain = self.name.removeprefix("val_")
            higher = False if plain == "loss" else getattr(metrics.get(plain), "higher_is_better", None)
            self.direction = None if higher is None else ("max" if higher else "min")

    def _check_name(self, metrics: Mapping[str, Any], *, validated: bool) -> None:
        plain = self.name.removeprefix("val_") if validated else self.name
        results = ["loss", *metrics]
        groups = [f"{name}_" for name, metric in metrics.items() if not isinstance(metric, SummedMetric)]
        if plain in results or plain.startswith(tuple(groups)) or self.name == LEARNING_RATE:
            return
        names = [*results, *(f"val_{name}" for name in results if validated), LEARNING_RATE]
        advice = "" if validated or not self.name.startswith("val_") else ", or give fit validation_data"
        raise ConfigError(
            f"{self._owner} monitors {self.name!r}, which the logs will lack; they will have: {', '.join(names)}. "
            f"Give one of these names as monitor{advice}"
        )

    def read(self, logs: Logs, *, validated: bool) -> float | None:
        """The monitored number; None if it is one of the validation and the epoch was not validated.

        ``validated`` says whether some epochs of this fit are. A ConfigError is raised if the logs lack the number.
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
        """Whether ``value`` improves ``reference`` by more than ``min_delta``. NaN never does; all else beats None."""
        if self.direction is None:
            raise ConfigError(
                f"{self._owner} cannot tell whether {self.name!r} is better high or low; give mode='max' or 'min'"
            )
        # Every comparison with NaN is false, so as a best value it would never be beaten.
        if math.isnan(value):
            return False
        if reference is None:
            return True
        return (value - reference if self.direction == "max" else reference - value) > self._min_delta
