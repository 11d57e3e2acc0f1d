"""The workloads, on synthetic inputs of the real shapes: what a step costs does not depend on what images show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trial import Batch, Workload
from lockstep.extras import require
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import masked_token_loss, new_bert

CLASSES = 2
_IMAGES, _PIXELS = 64, 96
_SEQUENCES, _TOKENS, _MASKED = 128, 128, 19
_FIRST_ORDINARY_ID = 5
_DIFFERENT_BATCHES = 4


class _TransformersMobileNet(nn.Module):
    """transformers' MobileNetV2 as a module from images [rows, 3, pixels, pixels] to logits [rows, classes]."""

    def __init__(self) -> None:
        super().__init__()
        transformers = require("transformers", "images")
        config = transformers.MobileNetV2Config(image_size=_PIXELS, num_labels=CLASSES)
        self.classifier = transformers.MobileNetV2ForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(pixel_values=images).logits
        return logits


def image_batches(batches: int, *, rows: int, pixels: int, different: int = _DIFFERENT_BATCHES) -> list[Batch]:
    """Random images [rows, 3, pixels, pixels] and their classes; ``different`` batches come again and again."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(min(batches, different)):
        images = torch.rand(rows, 3, pixels, pixels, generator=generator)
        made.append((images, torch.randint(CLASSES, (rows,), generator=generator)))
    return [made[index % different] for index in range(batches)]


def text_batches(
    batches: int, *, rows: int, tokens: int, masked: int, vocabulary: int, different: int = _DIFFERENT_BATCHES
) -> list[Batch]:
    """Random tokens [rows, tokens] with ``masked`` positions each; ``different`` batches come again and again."""
    generator = torch.Generator().manual_seed(1)
    made: list[Batch] = []
    for _ in range(min(batches, different)):
        ids = torch.randint(_FIRST_ORDINARY_ID, vocabulary, (rows, tokens), generator=generator)
        order = torch.rand(rows, tokens, generator=generator).argsort(dim=1)
        positions = order[:, :masked].sort(dim=1).values
        made.append(({"input_ids": ids, "masked_positions": positions}, ids.gather(1, positions)))
    return [made[index % different] for index in range(batches)]


def _padded_text_batches(batches: int, **sizes: int) -> list[Batch]:
    """With an attention mask, as the recipe's collator makes one."""
    made = text_batches(batches, **sizes)
    masks = {id(batch): torch.ones_like(batch[0]["input_ids"]) for batch in made}
    whole = {id(batch): ({**batch[0], "attention_mask": masks[id(batch)]}, batch[1]) for batch in made}
    return [whole[id(batch)] for batch in made]


def class_loss(logits: Tensor, classes: Tensor) -> tuple[Tensor, Any]:
    """(total, count) of logits [rows, classes] and classes [rows] int64."""
    return F.cross_entropy(logits, classes, reduction="sum"), len(classes)


def _linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * _PIXELS * _PIXELS, CLASSES))


_BERT_TINY = MlmConfig()
_image_batches = partial(image_batches, rows=_IMAGES, pixels=_PIXELS)
_MOBILENET = Workload(
    name="mobilenetv2",
    title=f"MobileNetV2 (transformers), {_PIXELS}x{_PIXELS}, {CLASSES} classes, global batch {_IMAGES}, Adam 1e-3, "
    "sparse cross-entropy",
    make_module=_TransformersMobileNet,
    make_batches=_image_batches,
    loss=class_loss,
    count=_IMAGES,
    learning_rate=1e-3,
)
_MLM = Workload(
    name="mlm",
    title=f"bert_tiny masked language model, global batch {_SEQUENCES} x {_TOKENS} tokens, {_MASKED} masked a row, "
    f"vocabulary {_BERT_TINY.vocabulary}, dropout {_BERT_TINY.dropout}, Adam 1e-4",
    make_module=partial(new_bert, _BERT_TINY),
    make_batches=partial(
        _padded_text_batches, rows=_SEQUENCES, tokens=_TOKENS, masked=_MASKED, vocabulary=_BERT_TINY.vocabulary
    ),
    loss=masked_token_loss,
    count=_SEQUENCES * _MASKED,
    learning_rate=1e-4,
)
_LINEAR = Workload(
    name="linear",
    title="one linear layer on the images of mobilenetv2: tries the harness in seconds",
    make_module=_linear,
    make_batches=_image_batches,
    loss=class_loss,
    count=_IMAGES,
    learning_rate=1e-3,
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in (_MOBILENET, _MLM, _LINEAR)}
USUAL_WORKLOADS = ("mobilenetv2", "mlm")
