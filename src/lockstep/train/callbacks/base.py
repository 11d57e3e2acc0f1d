"""The base class of callbacks: Keras's hooks and names, all doing nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
