"""The strings that ``compile`` takes for losses, optimizers and metrics, and what each one is.

    compile("adam", "cross_entropy", metrics=["accuracy"])

A loss is the function of torch.nn.functional with that name, or Keras's, an optimizer the class of torch.optim with its
own defaults, a metric ``Accuracy`` or ``F1``, or one of torchmetrics.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.train import keras_losses
from lockstep.train.classification import (
    F1,
    Accuracy,
    Outputs,
    ShiftedAccuracy,
    classes_and_labels,
    last_classes_and_labels,
)
from lockstep.train.loss_reduction import Pair, mean_as_pair

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "cross_entropy": F.cross_entropy,
    "huber": F.huber_loss,
    "mae": F.l1_loss,
    "mse": F.mse_loss,
    "nll": F.nll_loss,
    "smooth_l1": F.smooth_l1_loss,
    "sparse_categorical_crossentropy": keras_losses.sparse_categorical_crossentropy,
}
_NAMES = sorted([*_LOSSES, *keras_losses.VALUES])
_OF_CLASSES = ("cross_entropy", "nll", "sparse_categorical_crossentropy")
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
_METRICS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the module of torchmetrics, and the class in it
    "mae": ("regression", "MeanAbsoluteError", {}),
    "mse": ("regression", "MeanSquaredError", {}),
    "perplexity": ("text", "Perplexity", {"ignore_index": -100}),
    "r2": ("regression", "R2Score", {}),
    "rmse": ("regression", "MeanSquaredError", {"squared": False}),
}
_CLASSIFICATION: dict[str, Callable[[Outputs | None], Any]] = {
    "accuracy": Accuracy,
    "binary_accuracy": Accuracy,
    "f1": F1,
    "shifted_accuracy": ShiftedAccuracy,
}
_OF_KERAS = {
    "acc": "accuracy",
    "categorical_accuracy": "accuracy",
    "f1_score": "f1",
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
    "r2_score": "r2",
    "root_mean_squared_error": "rmse",
    "sparse_categorical_accuracy": "accuracy",
}
"""Keras's names of metrics. In the logs a metric has the name that it was given."""
_IGNORED = -100
T = TypeVar("T")


@dataclass(frozen=True)
class NamedLoss:
    """A mean loss of torch or Keras by its name in ``compile``, for targets as Keras and transformers shape them.

    Classes may be in dimension 1 of the outputs, as in torch, or in the last one, where Keras's losses have them.
    Targets are cast to the dtype that torch expects, and targets [n] beside outputs [n, 1] get that shape, instead of
    being broadcast.
    """

    name: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        function = keras_losses.VALUES.get(self.name) or _LOSSES[self.name]
        return function(*self._fitted(outputs, targets))

    def pair(self, outputs: Tensor, targets: Tensor) -> Pair | None:
        """The total and the count whose quotient the mean loss is; None for a loss of Keras's."""
        function = None if self.name in keras_losses.VALUES else _LOSSES[self.name]
        return None if function is None else mean_as_pair(function, *self._fitted(outputs, targets))

    def check_outputs(self, outputs: Any) -> None:
        """Compares outputs with what the loss takes: logits or probabilities. Waits for the device.

        Raises a ConfigError for outputs that are no probabilities, and warns of probabilities instead of logits.
        """
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            return
        keras_losses.refuse_other_outputs(self.name, outputs)
        if self.name == "cross_entropy" and keras_losses.are_distributions(outputs):
            warnings.warn(
                "loss 'cross_entropy' takes logits, and each row of the module's outputs is between 0 and 1 and adds "
                "up to 1, as after a softmax; leave the softmax out, or give compile the loss "
                "'sparse_categorical_crossentropy', which takes probabilities",
                stacklevel=2,
            )

    def values(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """The values that the mean is taken over, and how many count: not those of ignored labels."""
        fitted, labels = self._fitted(outputs, targets)
        if self.name in keras_losses.VALUES:
            values = keras_losses.VALUES[self.name](fitted, labels)
            return values, float(values.numel())
        values = _LOSSES[self.name](fitted, labels, reduction="none")
        if self.name not in _OF_CLASSES or labels.is_floating_point():
            return values, float(values.numel())
        return values.reshape(len(targets), -1).squeeze(1), (labels != _IGNORED).sum()

    def _fitted(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            raise ConfigError(
                f"loss={self.name!r} takes two tensors, got outputs of type {type(outputs).__name__} and targets of "
                f"type {type(targets).__name__}; give compile a function loss(outputs, targets)"
            )
        if self.name == "sparse_categorical_crossentropy":
            return last_classes_and_labels(outputs, targets)
        if self.name in _OF_CLASSES and targets.shape != outputs.shape:
            return classes_and_labels(outputs, targets)
        if targets.dim() == outputs.dim() - 1 and outputs.shape == (*targets.shape, 1):
            targets = targets.unsqueeze(-1)
        if targets.shape != outputs.shape:
            instead = ", or class numbers to 'sparse_categorical_crossentropy'" * self.name.startswith("categorical")
            raise ConfigError(
                f"loss={self.name!r} got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}; give them the same shape{instead}"
            )
        return outputs, targets.to(outputs.dtype)


@dataclass(frozen=True)
class ModuleLoss:
    """The loss in the module's own outputs: what ``compile`` without a loss means."""

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The mean loss that the module has computed."""
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss


def loss_named(loss: T | str) -> T | NamedLoss:
    """The loss of this name; what is no string is returned as it is.

    Raises a ConfigError for a name that is not known, and for a loss of Keras.
    """
    if not isinstance(loss, str):
        keras_losses.refuse_keras(loss)
        return loss
    name = loss if loss in _NAMES else keras_losses.torch_name(loss)
    if name not in _NAMES:
        name = loss
    _check("loss", name, _NAMES, "a function loss(outputs, targets)")
    return NamedLoss(name)


def optimizer_named(optimizer: T | str) -> T | Callable[..., torch.optim.Optimizer]:
    """The optimizer class of this name; what is no string is returned as it is."""
    if not isinstance(optimizer, str):
        return optimizer
    _check("optimizer", optimizer.lower(), _OPTIMIZERS, "a torch optimizer")
    return _OPTIMIZERS[optimizer.lower()]


def metrics_named(metrics: Any, loss: object) -> Any:
    """Metrics by name: of a list or dict of metrics and of names of metrics. ``loss`` says what the outputs are.

    A metric in a list is named by its string, or by its class: ``MulticlassF1Score`` is "multiclass_f1_score".
    """
    if isinstance(metrics, str):
        raise ConfigError(f"metrics is the string {metrics!r}; give a list, such as metrics=[{metrics!r}]")
    if isinstance(metrics, Sequence):
        names = [metric if isinstance(metric, str) else _snake_case(metric) for metric in metrics]
        if len(set(names)) < len(names):
            raise ConfigError(f"metrics has one name twice: {', '.join(names)}; give a dict of name to metric")
        metrics = dict(zip(names, metrics, strict=True))
    if not isinstance(metrics, Mapping):
        return metrics
    return {key: _metric_named(metric, loss) if isinstance(metric, str) else metric for key, metric in metrics.items()}


def takes_tensors(function: object) -> bool:
    """Whether this loss or metric of torch, torchmetrics or ours takes tensors: of a model's outputs, the logits."""
    function = without_partial(function)
    if isinstance(function, ModuleLoss):
        return False
    home: str = (function if hasattr(function, "__code__") else type(function)).__module__
    packages = ("torchmetrics.", "lockstep.train.")
    return home in ("torch.nn.functional", "torch.nn.modules.loss") or home.startswith(packages)


def without_partial(function: Any) -> Any:
    """The function that ``functools.partial`` calls with some arguments; another one as it is."""
    while isinstance(function, partial):
        function = function.func
    return function


def logits_of(outputs: Any) -> Any:
    """The logits of outputs that have them, such as those of transformers; other outputs as they are."""
    if type(outputs) is Tensor:
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) and not isinstance(outputs, Tensor) else outputs


def _metric_named(string: str, loss: object) -> Any:
    plain = string.lower() if string.isupper() else string
    name = _OF_KERAS.get(plain, plain)
    if name not in _CLASSIFICATION and name not in _METRICS:
        name = string
    _check(
        "metric", name, [*_CLASSIFICATION, *_METRICS, *_OF_KERAS], "a torchmetrics Metric, such as MulticlassAUROC(10)"
    )
    if name in _CLASSIFICATION:
        outputs = _outputs_of(loss)
        if name == "binary_accuracy" and outputs != "logits":
            outputs = "probabilities"
        return _CLASSIFICATION[name](outputs)
    module, of, settings = _METRICS[name]
    return getattr(require(f"torchmetrics.{module}", "train"), of)(**settings)


def _outputs_of(loss: object) -> Any:
    """What a loss takes the outputs for: "classes", "logits" or "probabilities" of two classes; None if unknown."""
    loss = without_partial(loss)
    if isinstance(loss, NamedLoss) and loss.name.endswith("crossentropy"):  # Keras's
        return "probabilities" if loss.name.startswith("binary") else "classes"
    function = _LOSSES.get(loss.name) if isinstance(loss, NamedLoss) else loss
    if function is F.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss):
        return "logits"
    if function is F.binary_cross_entropy or isinstance(loss, nn.BCELoss):
        return "probabilities"
    is_of_classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (F.cross_entropy, F.nll_loss)
    return "classes" if is_of_classes else None


def _snake_case(metric: object) -> str:
    kind = metric if isinstance(metric, type) else type(metric)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _check(what: str, name: str, choices: Iterable[str], otherwise: str) -> None:
    if name not in choices:
        raise ConfigError(
            f"{what} {name!r} is unknown; choose {', '.join(map(repr, sorted(choices)))}, or give {otherwise}"
        )
