"""What is trained on the GPU: two models at sizes that fill one, each in two precisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.models import PlainBert, PlainMobileNetV2
from benchmarks.trial import Batch, Workload
from lockstep.recipes.mlm.model import BertShape

GpuPrecision = Literal["bf16", "fp32"]

PRECISIONS: tuple[GpuPrecision, ...] = ("bf16", "fp32")
_CLASSES = 2
_DIFFERENT_BATCHES = 2
_FIRST_ORDINARY_ID = 5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the work is."""

    texts: int  # rows of a global batch
    tokens: int  # of a row
    masked: int  # tokens of a row that are to be found
    pictures: int  # rows of a global batch
    pixels: int  # of a picture's side
    shape: BertShape = field(default_factory=BertShape)  # of the BERT


FULL = Sizes(texts=128, tokens=512, masked=77, pictures=256, pixels=224)
"""The published sizes: 15% of 512 tokens are 77."""
TINY = Sizes(
    texts=8,
    tokens=12,
    masked=2,
    pictures=8,
    pixels=32,
    shape=BertShape(layers=1, hidden=16, feed_forward=32, vocabulary=64, positions=16),
)
"""Tries the programs on a CPU in seconds; what they take there says nothing about a GPU."""


def gpu_workloads(sizes: Sizes) -> dict[str, Workload]:
    """The workloads by name: ``mlm-bf16``, ``mlm-fp32``, ``mobilenetv2-bf16``, ``mobilenetv2-fp32``."""
    made = [make(sizes, precision) for make in (_texts, _pictures) for precision in PRECISIONS]
    return {workload.name: workload for workload in made}


def precision_of(workload: Workload) -> GpuPrecision:
    """The precision that is part of a workload's name."""
    return "bf16" if workload.name.endswith("-bf16") else "fp32"


def _texts(sizes: Sizes, precision: GpuPrecision) -> Workload:
    return Workload(
        name=f"mlm-{precision}",
        title=f"bert_tiny masked language model, global batch {sizes.texts} x {sizes.tokens} tokens, {sizes.masked} "
        f"masked a row, vocabulary {sizes.shape.vocabulary}, dropout {sizes.shape.dropout}, Adam 1e-4, "
        f"{_precision_text(precision)}",
        make_module=partial(PlainBert, sizes.shape),
        make_batches=partial(_text_batches, sizes=sizes),
        loss=masked_loss,
        count=sizes.texts * sizes.masked,
        learning_rate=1e-4,
    )


def _pictures(sizes: Sizes, precision: GpuPrecision) -> Workload:
    return Workload(
        name=f"mobilenetv2-{precision}",
        title=f"MobileNetV2, {sizes.pixels}x{sizes.pixels}, {_CLASSES} classes, global batch {sizes.pictures}, "
        f"Adam 1e-3, {_precision_text(precision)}",
        make_module=_mobilenet,
        make_batches=partial(_picture_batches, sizes=sizes),
        loss=class_loss,
        count=sizes.pictures,
        learning_rate=1e-3,
    )


def _precision_text(precision: GpuPrecision) -> str:
    return "bf16 by autocast" if precision == "bf16" else "fp32 with TF32 allowed"


def _mobilenet() -> nn.Module:
    return PlainMobileNetV2(_CLASSES)


def masked_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The pair (total, count) over all masked tokens; neither asks the device for anything.

    Args:
        logits: [rows * slots, vocabulary].
        labels: [rows, slots] int64.
    """
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), labels.numel()


def class_loss(logits: Tensor, classes: Tensor) -> tuple[Tensor, int]:
    """The pair (total, count) of logits [rows, classes] and classes [rows] int64."""
    return F.cross_entropy(logits, classes, reduction="sum"), len(classes)


def _text_batches(batches: int, *, sizes: Sizes) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        rows = (sizes.texts, sizes.tokens)
        tokens = torch.randint(_FIRST_ORDINARY_ID, sizes.shape.vocabulary, rows, generator=generator)
        order = torch.rand(rows, generator=generator).argsort(dim=1)
        positions = order[:, : sizes.masked].sort(dim=1).values
        named: dict[str, Any] = {"input_ids": tokens, "masked_positions": positions}
        return named, tokens.gather(1, positions)

    return _repeated([batch() for _ in range(min(batches, _DIFFERENT_BATCHES))], batches)


def _picture_batches(batches: int, *, sizes: Sizes) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        pictures = torch.rand(sizes.pictures, 3, sizes.pixels, sizes.pixels, generator=generator)
        return pictures, torch.randint(_CLASSES, (sizes.pictures,), generator=generator)

    return _repeated([batch() for _ in range(min(batches, _DIFFERENT_BATCHES))], batches)


def _repeated(different: list[Batch], batches: int) -> list[Batch]:
    return [different[index % len(different)] for index in range(batches)]
