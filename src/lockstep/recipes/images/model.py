"""transformers' MobileNetV2 (Sandler et al. 2018) as a module from pictures to logits.

    pictures [rows, 3, size, size] -> MobileNetV2Model, average pooling -> [rows, features]
      -> dropout -> (Dense(hidden), ReLU ->) Dense(classes) -> logits [rows, classes]

Without a hidden layer the keys of the state_dict are those of MobileNetV2ForImageClassification: weights go both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require

_STRIDES = (8, 16, 32)
_LARGEST = 4096


@dataclass(frozen=True, kw_only=True)
class MobileNetShape:
    """The size of a MobileNetV2; the defaults are the published ones, with 2,223,872 parameters before the classes.

    Args:
        size: side of its pictures, in pixels; at least ``output_stride``.
        hidden: width of a layer with ReLU before the classes; 0 is none.
        width_multiplier: makes every layer narrower or wider.
        output_stride: how many times smaller the last feature map is than the picture: 8, 16 or 32.
        dropout: probability, for the pooled features. transformers' own default reads 0.8, which was TensorFlow's
            probability to keep; torch drops that much.
        batch_norm_momentum: weight of a new batch in the running statistics. transformers' own value is 0.997, which
            was TensorFlow's weight of the old ones; in torch the statistics are then those of the last batch alone.
    """

    size: int = 224
    hidden: int = 0
    width_multiplier: float = 1.0
    output_stride: int = 32
    dropout: float = 0.0
    batch_norm_momentum: float = 0.1

    def __post_init__(self) -> None:
        if self.output_stride not in _STRIDES:
            raise ConfigError(f"output_stride={self.output_stride} was given; choose one of 8, 16 or 32")
        if not self.output_stride <= self.size <= _LARGEST:
            raise ConfigError(
                f"size={self.size} was given, expected from {self.output_stride} to {_LARGEST} pixels: the last feature"
                f" map is output_stride={self.output_stride} times smaller than the picture; give a larger one"
            )
        if not 0 <= self.hidden <= 2**16:
            raise ConfigError(f"hidden={self.hidden} was given, expected from 0 (no hidden layer) to {2**16}; try 512")
        if not 0 < self.width_multiplier <= 8:
            raise ConfigError(
                f"width_multiplier={self.width_multiplier} was given, expected above 0 and up to 8; try 1"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} was given, expected a probability in [0, 1); try 0.2")
        if not 0 < self.batch_norm_momentum <= 1:
            raise ConfigError(
                f"batch_norm_momentum={self.batch_norm_momentum} was given, expected above 0 and up to 1; try 0.1"
            )


class PictureClassifier(nn.Module):
    """MobileNetV2 without its top, pooling, and a head for the classes.

    Args:
        mobilenet: a transformers MobileNetV2Model with its pooling layer.
        head: from pooled features [rows, features] to logits [rows, classes].
        dropout: probability, for the pooled features.
    """

    def __init__(self, mobilenet: Any, head: nn.Module, *, dropout: float) -> None:
        super().__init__()
        self.mobilenet_v2 = mobilenet
        self.dropout = nn.Dropout(dropout)
        self.classifier = head

    @property
    def architecture(self) -> str:
        """The class of transformers that loads the weights."""
        plain = isinstance(self.classifier, nn.Linear)
        return "MobileNetV2ForImageClassification" if plain else "MobileNetV2Model"

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits [rows, classes] of pictures [rows, 3, size, size] float32."""
        pooled = self.mobilenet_v2(pixel_values=pictures).pooler_output
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


def new_mobilenet(shape: MobileNetShape, classes: Sequence[str]) -> PictureClassifier:
    """A model of random weights, drawn from torch's default generator.

    Args:
        shape: its size.
        classes: their names, in the order of the logits.
    """
    transformers = require("transformers", "images")
    config = transformers.MobileNetV2Config(
        image_size=shape.size,
        depth_multiplier=shape.width_multiplier,
        output_stride=shape.output_stride,
        classifier_dropout_prob=shape.dropout,
        **class_names(classes),
    )
    mobilenet = transformers.MobileNetV2Model(config)
    return with_head(mobilenet, shape, len(classes))


def class_names(classes: Sequence[str]) -> dict[str, Any]:
    """The names of the logits as transformers' configs keep them."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}


def with_head(mobilenet: Any, shape: MobileNetShape, classes: int) -> PictureClassifier:
    """``mobilenet`` with a new head, its batch norms set as ``shape`` says."""
    for part in mobilenet.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = shape.batch_norm_momentum
    features: int = mobilenet.conv_1x1.convolution.out_channels
    return PictureClassifier(mobilenet, _head(features, shape.hidden, classes), dropout=shape.dropout)


def _head(features: int, hidden: int, classes: int) -> nn.Module:
    if not hidden:
        return nn.Linear(features, classes)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
