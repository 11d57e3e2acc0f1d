"""Accuracy: the metric that ``compile(metrics=["accuracy"])`` means. Importing this needs torchmetrics.

torchmetrics asks for the number of classes; here the shapes say it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.errors import ConfigError
from lockstep.train.names import classes_and_labels

Outputs = Literal["classes", "logits", "probabilities"]
_IGNORED = -100


class Accuracy(Metric):
    """The fraction of targets that the outputs meet. Targets of -100 beside scores of classes do not count.

    Args:
        outputs: what outputs are: scores of "classes", whose largest one is the prediction; or "logits" or
            "probabilities" of yes and no, for targets of the same shape. None: scores of classes if the shapes say so.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self, outputs: Outputs | None = None) -> None:
        super().__init__()
        self._outputs = outputs
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts the rows of a batch."""
        if self._outputs in ("logits", "probabilities"):
            if targets.numel() != outputs.numel():
                raise ConfigError(
                    f"accuracy got outputs of shape {tuple(outputs.shape)} and targets of shape "
                    f"{tuple(targets.shape)}; give one target per output"
                )
            met = (outputs > (0 if self._outputs == "logits" else 0.5)) == (targets.reshape(outputs.shape) > 0.5)
            self._count(met, torch.ones_like(met))
            return
        if targets.shape == outputs.shape:
            if self._outputs is None:
                raise ConfigError(
                    "accuracy cannot tell what outputs with the shape of the targets are; give a torchmetrics Metric, "
                    "such as BinaryAccuracy() or MultilabelAccuracy(5)"
                )
            targets = targets.argmax(1)  # one-hot, or probabilities
        outputs, labels = classes_and_labels(outputs, targets)
        self._count(outputs.argmax(1) == labels, labels != _IGNORED)

    def _count(self, met: Tensor, counts: Tensor) -> None:
        self.correct += met.sum()
        self.total += counts.sum()

    def compute(self) -> Tensor:
        """The fraction of all that was counted."""
        return self.correct / self.total
