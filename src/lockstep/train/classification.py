"""Outputs and targets of classification: where the classes are, and the metrics accuracy and F1.

``compile(metrics=["accuracy", "f1"])`` means these metrics. torchmetrics asks for the number of classes, which these
metrics read from the shapes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.train.summed_metric import SummedMetric

Outputs = Literal["classes", "logits", "probabilities"]
_IGNORED = -100


def classes_and_labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs with the classes in dimension 1, and class numbers for them.

    Raises a ConfigError for shapes that do not belong together, or that could be meant in two ways.
    """
    labels = targets.squeeze(-1) if targets.dim() == outputs.dim() and targets.shape[-1] == 1 else targets
    as_torch = outputs.dim() > 1 and (outputs.shape[0], *outputs.shape[2:]) == labels.shape
    last = outputs.dim() > 1 and outputs.shape[:-1] == labels.shape
    if labels.is_floating_point() or not (as_torch or last) or (as_torch and last and outputs.dim() > 2):
        raise ConfigError(
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}, {targets.dtype}, "
            "are no scores of classes and class numbers whose dimensions can be told apart; give outputs (rows, "
            "classes) or (rows, tokens, classes) and integer targets without the classes, or a function of them"
        )
    if as_torch:
        return outputs, labels.long()
    return outputs.flatten(0, -2), labels.flatten().long()


def last_classes_and_labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs with the classes in dimension 1, and class numbers for them; of outputs with the classes in the last one.

    Keras has them there. Raises a ConfigError for shapes that do not belong together.
    """
    labels = targets.squeeze(-1) if targets.dim() == outputs.dim() and targets.shape[-1] == 1 else targets
    if outputs.dim() < 2 or labels.shape != outputs.shape[:-1]:
        one_hot = ", or one-hot targets to 'categorical_crossentropy'" * (labels.shape == outputs.shape)
        raise ConfigError(
            f"loss='sparse_categorical_crossentropy' got outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}; give outputs (rows, classes) or (rows, tokens, classes) and class numbers of "
            f"that shape without the classes{one_hot}"
        )
    return outputs.flatten(0, -2), labels.flatten().long()


class _OfDecisions(SummedMetric):
    """Base of the metrics that compare decisions with targets. Targets of -100 beside scores of classes do not count.

    Args:
        outputs: what outputs are: scores of "classes", whose largest one is the decision; or "logits" or
            "probabilities" of yes and no, for targets of the same shape. None: scores of classes if the shapes say so.
    """

    name: str

    def __init__(self, outputs: Outputs | None, *states: str) -> None:
        super().__init__(*states)
        self._outputs = outputs

    @property
    def _are_yes_or_no(self) -> bool:
        return self._outputs in ("logits", "probabilities")

    def _yes_or_no(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which outputs and which targets say yes, in the shape of the outputs."""
        if targets.numel() != outputs.numel():
            raise ConfigError(
                f"{self.name} got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}; give one target per output"
            )
        return outputs > (0 if self._outputs == "logits" else 0.5), targets.reshape(outputs.shape) > 0.5

    def _classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int]:
        """The class numbers of outputs and of targets, and how many classes there are."""
        if targets.shape == outputs.shape:
            if self._outputs is None:
                raise ConfigError(
                    f"{self.name} cannot tell what outputs with the shape of the targets are; give a torchmetrics "
                    "Metric, such as BinaryAccuracy() or MultilabelF1Score(5)"
                )
            targets = targets.argmax(1)  # one-hot, or probabilities
        outputs, labels = classes_and_labels(outputs, targets)
        return outputs.argmax(1).flatten(), labels.flatten(), outputs.shape[1]


class Accuracy(_OfDecisions):
    """The fraction of targets that the outputs meet."""

    name = "accuracy"
    correct: Tensor
    total: Tensor

    def __init__(self, outputs: Outputs | None = None) -> None:
        super().__init__(outputs, "correct", "total")

    def count(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts the rows of a batch."""
        if self._are_yes_or_no:
            predictions, labels = self._yes_or_no(outputs, targets)
            self.total += labels.numel()
        else:
            predictions, labels, _ = self._classes(outputs, targets)
            self.total += (labels != _IGNORED).sum()
        self.correct += (predictions == labels).sum()

    def compute(self) -> Tensor:
        """The fraction of all that was counted."""
        return self.correct / self.total


class ShiftedAccuracy(Accuracy):
    """The accuracy of causal language models: the outputs at each token beside the label of the next one."""

    name = "shifted_accuracy"

    def count(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts the rows of a batch: scores [rows, tokens, classes] and labels [rows, tokens]."""
        if outputs.dim() != 3 or targets.shape != outputs.shape[:2]:
            raise ConfigError(
                f"{self.name} got outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(targets.shape)}; give logits (rows, tokens, classes) and the tokens as labels"
            )
        super().count(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


class F1(_OfDecisions):
    """The F1 score, as ``keras.metrics.F1Score(average="macro")``: the mean over the classes, or over several labels.

    With one yes or no per row it is the score of yes, at a threshold of 0.5. A class that was neither found nor meant
    counts as 0.
    """

    name = "f1"
    found: Tensor
    counted: Tensor

    def __init__(self, outputs: Outputs | None = None) -> None:
        # One number per class, from the first update on: how often predictions and targets both name it, and how
        # often each of them does. "found" is in saved states, so it keeps this name.
        super().__init__(outputs, "found", "counted")

    def count(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts the rows of a batch."""
        if self._are_yes_or_no:
            if outputs.dim() > 2:
                raise ConfigError(
                    f"f1 got outputs of shape {tuple(outputs.shape)}; give (rows,), (rows, labels), or a torchmetrics "
                    "Metric, such as BinaryF1Score()"
                )
            predictions, truth = (values.reshape(len(outputs), -1) for values in self._yes_or_no(outputs, targets))
            # Not in place: the state begins as a single 0, and has a number for each class from the first update on.
            self.found = self.found + (predictions & truth).sum(0)
            self.counted = self.counted + predictions.sum(0) + truth.sum(0)
            return
        predictions, truth, classes = self._classes(outputs, targets)
        counts, labels = (truth != _IGNORED).long(), truth.clamp(min=0)
        zeros = torch.zeros(classes, dtype=torch.long, device=outputs.device)
        self.found = self.found + zeros.scatter_add(0, labels, counts * (predictions == truth))
        self.counted = self.counted + zeros.scatter_add(0, labels, counts).scatter_add(0, predictions, counts)

    def compute(self) -> Tensor:
        """The score of all that was counted."""
        return (2 * self.found / self.counted.clamp(min=1)).mean()
