"""The losses that Keras's names in ``compile`` mean, such as "sparse_categorical_crossentropy".

Keras's losses by name take probabilities, and torch's "cross_entropy" takes logits. Each would train on the other
without an error, so the outputs are compared with what the name takes: in the first steps on the host, with an error
that says what to write, and in every step on the device, where other outputs give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import ConfigError

_EPSILON = 1e-7  # keras.config.epsilon()
_SUM_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""How far the probabilities of a row may add up to something else than 1; of other dtypes ``_EXACT_SUM``."""
_EXACT_SUM = 1e-3


def _are_probabilities(outputs: Tensor) -> Tensor:
    """Whether each row of the last dimension is a distribution, [..., 1]."""
    tolerance = _SUM_TOLERANCE.get(outputs.dtype, _EXACT_SUM)
    values = _at_least_float32(outputs)
    return ((values.sum(-1, keepdim=True) - 1).abs() <= tolerance) & (values >= 0).all(-1, keepdim=True)


def are_distributions(outputs: Tensor) -> bool:
    """Whether all rows of the last dimension, of at least two numbers, are probabilities. Waits for the device."""
    return outputs.dim() > 1 and outputs.shape[-1] > 1 and bool(_are_probabilities(outputs.detach()).all())


def _are_between_0_and_1(outputs: Tensor) -> Tensor:
    return (outputs >= 0) & (outputs <= 1)


def _at_least_float32(outputs: Tensor) -> Tensor:
    return outputs if outputs.dtype in (torch.float32, torch.float64) else outputs.float()


def _log_probabilities(outputs: Tensor) -> Tensor:
    """As Keras: divided by their sum and clipped; NaN in rows that are no distribution."""
    values = _at_least_float32(outputs)
    # Keras divides by the sum and clips, too: the numbers are its own, also of rows whose sum is rounded.
    clipped = (values / values.sum(-1, keepdim=True)).clamp(_EPSILON, 1 - _EPSILON)
    # NaN instead of an error: to ask the device would make the host wait in every step, and a loss that is NaN ends the
    # fit.
    return clipped.log().where(_are_probabilities(outputs), math.nan)


def sparse_categorical_crossentropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Of probabilities [rows, classes] and class numbers [rows]."""
    return F.nll_loss(_log_probabilities(outputs), targets, reduction=reduction)


def _categorical_crossentropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(targets * _log_probabilities(outputs)).sum(-1)


def _binary_crossentropy(outputs: Tensor, targets: Tensor) -> Tensor:
    values = _at_least_float32(outputs).clamp(_EPSILON, 1 - _EPSILON)
    losses = -(targets * values.log() + (1 - targets) * (1 - values).log())
    return losses.where(_are_between_0_and_1(outputs), math.nan)


def _kl_divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    expected = targets.clamp(_EPSILON, 1)
    return (expected * (expected.log() - _log_probabilities(outputs))).sum(-1)


def _log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    error = outputs - targets
    # log(cosh(x)) itself overflows from x = 90 on in float32.
    return error + F.softplus(-2 * error) - math.log(2)


def _percentage_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100 * ((targets - outputs) / targets.abs().clamp(min=_EPSILON)).abs()


def _logarithmic_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.clamp(min=_EPSILON).log1p() - targets.clamp(min=_EPSILON).log1p()).square()


def _poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs - targets * (outputs + _EPSILON).log()


VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_crossentropy": _binary_crossentropy,
    "categorical_crossentropy": _categorical_crossentropy,
    "kl_divergence": _kl_divergence,
    "log_cosh": _log_cosh,
    "mean_absolute_percentage_error": _percentage_error,
    "mean_squared_logarithmic_error": _logarithmic_error,
    "poisson": _poisson,
}
"""Losses with one value for each row, or for each output, of outputs and targets of one shape."""

_SAME = {
    "bce": "binary_crossentropy",
    "kld": "kl_divergence",
    "mape": "mean_absolute_percentage_error",
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
    "msle": "mean_squared_logarithmic_error",
}
_ADVICE = {
    "binary_focal_crossentropy": "a function of torchvision.ops.sigmoid_focal_loss, which takes logits",
    "categorical_focal_crossentropy": "a function loss(outputs, targets) that returns one value per row",
    "categorical_hinge": "torch.nn.MultiMarginLoss(), which takes class numbers",
    "cosine_similarity": "lambda outputs, targets: -torch.nn.functional.cosine_similarity(outputs, targets, dim=-1)",
    "ctc": "a function of torch.nn.functional.ctc_loss, which takes the lengths too",
    "hinge": "lambda outputs, targets: (1 - targets * outputs).clamp(min=0), with targets of -1 and 1",
    "squared_hinge": "lambda outputs, targets: (1 - targets * outputs).clamp(min=0).square(), with targets of -1 and 1",
}
"""Losses that Keras has by name, and what to give instead."""
_LOGITS_OF = {
    "binary_crossentropy": ("sigmoid", "binary_cross_entropy_with_logits"),
    "categorical_crossentropy": ("softmax", "cross_entropy"),
    "kl_divergence": ("softmax", ""),
    "sparse_categorical_crossentropy": ("softmax", "cross_entropy"),
}
"""By the names that take probabilities: what makes them of logits, and the loss that takes logits."""


def torch_name(name: str) -> str:
    """The name that a loss has here: of Keras's other names for it, such as "MeanSquaredError" and "MSE".

    Raises a ConfigError that says what to give for a loss that only Keras has by name.
    """
    plain = name.lower() if name.isupper() else _snake_case(name)
    if plain in _ADVICE:
        raise ConfigError(f"loss {name!r} of Keras has no name here; give {_ADVICE[plain]}")
    return _SAME.get(plain, plain)


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def refuse_keras(loss: object) -> None:
    """Raises a ConfigError for a loss object or function of Keras, which takes (targets, outputs)."""
    if type(loss).__module__.startswith("keras.") or getattr(loss, "__module__", "").startswith("keras."):
        name = getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"loss is Keras's {name}, which takes (targets, outputs) in the other order; give its name, which takes "
            "probabilities, or one of torch's: torch.nn.CrossEntropyLoss() or torch.nn.BCEWithLogitsLoss() for "
            "from_logits=True"
        )


def refuse_other_outputs(name: str, outputs: Tensor) -> None:
    """Raises a ConfigError if the loss of this name takes probabilities and these are none. Waits for the device."""
    if name not in _LOGITS_OF or not outputs.numel():
        return
    fits = _are_between_0_and_1(outputs) if name == "binary_crossentropy" else _are_probabilities(outputs)
    # NaN is not between 0 and 1 either, and the error about it names the step.
    if bool(fits.all()) or bool(outputs.isnan().any()):  # NaN has an error of its own
        return
    function, of_logits = _LOGITS_OF[name]
    values = outputs.detach().float()
    instead = f"; for logits give compile the loss {of_logits!r} and leave the {function} out" if of_logits else ""
    raise ConfigError(
        f"loss {name!r} takes probabilities, as in Keras, and the module's outputs are none: they are between "
        f"{values.min().item():.4g} and {values.max().item():.4g}, and their sums over the last dimension between "
        f"{values.sum(-1).min().item():.4g} and {values.sum(-1).max().item():.4g}; end the module with a {function}"
        f"{instead}"
    )
