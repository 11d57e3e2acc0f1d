"""The accuracy of the masked tokens."""

from __future__ import annotations

from torch import Tensor

from lockstep.recipes.mlm.model import IGNORED_LABEL
from lockstep.train.summed_metric import SummedMetric


class MaskedTokenAccuracy(SummedMetric):
    """The fraction of masked tokens whose likeliest prediction is correct.

    torchmetrics' MulticlassAccuracy expects as many labels as rows of logits, and our labels are padded row by row. At
    [608, 30522] on one core an update takes 12 ms here, 12 ms in MulticlassAccuracy(average="micro"), and 6,050 ms with
    its default average.
    """

    correct: Tensor
    masked: Tensor

    def __init__(self) -> None:
        super().__init__("correct", "masked")

    def count(self, logits: Tensor, labels: Tensor) -> None:
        """Adds logits [masked, vocabulary] or [rows, slots, vocabulary], and padded labels [rows, slots]."""
        real = labels != IGNORED_LABEL
        targets = labels if logits.ndim == 3 else labels[real]
        self.correct += (logits.argmax(dim=-1) == targets).sum()
        self.masked += real.sum()

    def compute(self) -> Tensor:
        """Returns correct tokens / masked tokens; NaN before the first batch."""
        return self.correct / self.masked
