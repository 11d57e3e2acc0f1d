"""Accuracy and F1: the metrics that ``compile(metrics=["accuracy", "f1"])`` means.

torchmetrics asks for the number of classes; here the shapes say it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.train.names import classes_and_labels
from lockstep.train.summed_metric import SummedMetric

Outputs = Literal["classes", "logits", "probabilities"]
_IGNORED = -100


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
