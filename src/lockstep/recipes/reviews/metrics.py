"""Accuracy and F1 of the Trainer's predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.extras import require


def accuracy_and_f1(prediction: Any) -> dict[str, float]:
    """What a Trainer calls ``compute_metrics``.

    Args:
        prediction: has ``predictions``, the logits [rows, classes], and ``label_ids`` [rows], as numpy arrays.

    Returns:
        accuracy, and f1: of the higher class where there are two, so of the good reviews, and else the mean over all.
    """
    logits, classes = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return scores(logits, classes)


def scores(logits: Tensor, classes: Tensor) -> dict[str, float]:
    """Accuracy and F1 of logits [rows, classes] for the right classes [rows] int64."""
    functional = require("torchmetrics.functional.classification", "text")
    count = logits.shape[1]
    f1 = functional.multiclass_f1_score(logits, classes, num_classes=count, average="none")
    return {
        "accuracy": float((logits.argmax(dim=1) == classes).float().mean()),
        "f1": float(f1[1] if count == 2 else f1.mean()),
    }
