"""The workloads, on made-up inputs of the real shapes: what a step costs does not depend on what the pictures show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trial import Batch, Workload
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.mlm.model import BertShape, masked_token_loss, new_bert

_CLASSES = 2
_PICTURES, _PIXELS = 64, 96
_TEXTS, _TOKENS, _MASKED = 128, 128, 19
_FIRST_ORDINARY_ID = 5
_DIFFERENT_BATCHES = 4


class _Pictures(nn.Module):
    """transformers' MobileNetV2 as a module from pictures to logits."""

    def __init__(self) -> None:
        super().__init__()
        transformers = require("transformers", "images")
        config = transformers.MobileNetV2Config(image_size=_PIXELS, num_labels=_CLASSES)
        self.classifier = transformers.MobileNetV2ForImageClassification(config)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits [rows, classes] of pictures [rows, 3, pixels, pixels]."""
        logits: Tensor = self.classifier(pixel_values=pictures).logits
        return logits


def _repeated(different: list[Batch], batches: int) -> list[Batch]:
    return [different[index % len(different)] for index in range(batches)]


def _picture_batches(batches: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        pictures = torch.rand(_PICTURES, 3, _PIXELS, _PIXELS, generator=generator)
        return pictures, torch.randint(_CLASSES, (_PICTURES,), generator=generator)

    return _repeated([batch() for _ in range(_DIFFERENT_BATCHES)], batches)


def _text_batches(batches: int, *, shape: BertShape) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        tokens = torch.randint(_FIRST_ORDINARY_ID, shape.vocabulary, (_TEXTS, _TOKENS), generator=generator)
        order = torch.rand(_TEXTS, _TOKENS, generator=generator).argsort(dim=1)
        positions = order[:, :_MASKED].sort(dim=1).values
        named = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "masked_positions": positions}
        return named, tokens.gather(1, positions)

    return _repeated([batch() for _ in range(_DIFFERENT_BATCHES)], batches)


def _class_loss(logits: Tensor, classes: Tensor) -> tuple[Tensor, Any]:
    return F.cross_entropy(logits, classes, reduction="sum"), len(classes)


def _small_module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * _PIXELS * _PIXELS, _CLASSES))


_BERT_TINY = BertShape()

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload(
                name="mobilenetv2",
                title=f"MobileNetV2 (transformers), {_PIXELS}x{_PIXELS}, {_CLASSES} classes, global batch {_PICTURES}, "
                "Adam 1e-3, sparse cross-entropy",
                make_module=_Pictures,
                make_batches=_picture_batches,
                loss=_class_loss,
                count=_PICTURES,
                learning_rate=1e-3,
            ),
            Workload(
                name="mlm",
                title=f"bert_tiny masked language model, global batch {_TEXTS} x {_TOKENS} tokens, {_MASKED} masked a "
                f"row, vocabulary {_BERT_TINY.vocabulary}, dropout {_BERT_TINY.dropout}, Adam 1e-4",
                make_module=partial(new_bert, _BERT_TINY),
                make_batches=partial(_text_batches, shape=_BERT_TINY),
                loss=masked_token_loss,
                count=_TEXTS * _MASKED,
                learning_rate=1e-4,
            ),
            Workload(
                name="linear",
                title="one linear layer on the pictures of mobilenetv2: tries the harness in seconds",
                make_module=_small_module,
                make_batches=_picture_batches,
                loss=_class_loss,
                count=_PICTURES,
                learning_rate=1e-3,
            ),
        )
    }
)


USUAL_WORKLOADS = ("mobilenetv2", "mlm")


def find_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload is called {name!r}; choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
