"""What is trained on the GPU: two models at sizes that fill one, each in two precisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.models import PlainBert, PlainMobileNetV2
from benchmarks.trial import Workload
from benchmarks.workloads import CLASSES, class_loss, image_batches, text_batches
from lockstep_tools.recipes.mlm.config import MlmConfig

GpuPrecision = Literal["bf16", "fp32"]
PRECISIONS: tuple[GpuPrecision, ...] = ("bf16", "fp32")
_DIFFERENT_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the work is."""

    sequences: int  # rows of a global batch
    tokens: int  # of a row
    masked: int  # tokens of a row that are predicted
    images: int  # rows of a global batch
    pixels: int  # of an image's side
    shape: MlmConfig = field(default_factory=MlmConfig)


FULL = Sizes(sequences=128, tokens=512, masked=77, images=256, pixels=224)
"""The published sizes: 15% of 512 tokens are 77."""
TINY = Sizes(
    sequences=8,
    tokens=12,
    masked=2,
    images=8,
    pixels=32,
    shape=MlmConfig(layers=1, hidden=16, feed_forward=32, vocabulary=64, sequence_length=16),
)
"""Tries the programs on a CPU in seconds; what they take there says nothing about a GPU."""


def gpu_workloads(sizes: Sizes) -> dict[str, Workload]:
    """The workloads by name: ``mlm-bf16``, ``mlm-fp32``, ``mobilenetv2-bf16``, ``mobilenetv2-fp32``."""
    made = [make(sizes, precision) for make in (_mlm, _mobilenet) for precision in PRECISIONS]
    return {workload.name: workload for workload in made}


def precision_of(workload: str) -> GpuPrecision:
    """The precision that is part of a workload's name."""
    return "bf16" if workload.endswith("-bf16") else "fp32"


def _mlm(sizes: Sizes, precision: GpuPrecision) -> Workload:
    rows, tokens, masked, vocabulary = sizes.sequences, sizes.tokens, sizes.masked, sizes.shape.vocabulary
    make_batches = partial(text_batches, rows=rows, tokens=tokens, masked=masked, vocabulary=vocabulary)
    return Workload(
        name=f"mlm-{precision}",
        title=f"bert_tiny masked language model, global batch {rows} x {tokens} tokens, {masked} masked a row, "
        f"vocabulary {vocabulary}, dropout {sizes.shape.dropout}, Adam 1e-4, {_precision_text(precision)}",
        make_module=partial(PlainBert, sizes.shape),
        make_batches=partial(make_batches, different=_DIFFERENT_BATCHES),
        loss=masked_loss,
        count=rows * masked,
        learning_rate=1e-4,
    )


def _mobilenet(sizes: Sizes, precision: GpuPrecision) -> Workload:
    return Workload(
        name=f"mobilenetv2-{precision}",
        title=f"MobileNetV2, {sizes.pixels}x{sizes.pixels}, {CLASSES} classes, global batch {sizes.images}, Adam 1e-3, "
        f"{_precision_text(precision)}",
        make_module=partial(PlainMobileNetV2, CLASSES),
        make_batches=partial(image_batches, rows=sizes.images, pixels=sizes.pixels, different=_DIFFERENT_BATCHES),
        loss=class_loss,
        count=sizes.images,
        learning_rate=1e-3,
    )


def _precision_text(precision: GpuPrecision) -> str:
    return "bf16 by autocast" if precision == "bf16" else "fp32 with TF32 allowed"


def masked_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """(total, count) over all masked tokens, without a wait for the device.

    Args:
        logits: [rows * slots, vocabulary].
        labels: [rows, slots] int64.
    """
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), labels.numel()
