"""transformers' MobileNetV2 (Sandler et al. 2018) as a module from pictures to logits.

    pictures [rows, 3, size, size] -> MobileNetV2Model, average pooling -> [rows, features]
      -> dropout -> (Dense(hidden), ReLU ->) Dense(classes) -> logits [rows, classes]

Without a hidden layer the keys of the state_dict are those of MobileNetV2ForImageClassification: weights go both ways.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.atomic_files import atomic_write
from lockstep.checkpoint.weights import read_weights
from lockstep.collectives.communicator import run_on_chief
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.from_hub import check_kind, load_named, quiet_transformers
from lockstep.recipes.images.batches import PixelRange
from lockstep.train.model import Model

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


WEIGHTS_FILE = "model.safetensors"
_HEAD = "classifier."


def load_mobilenet(name: str, shape: MobileNetShape, classes: Sequence[str]) -> PictureClassifier:
    """The features of a trained MobileNetV2 with a head for ``classes``.

    The head is the trained one where ``name`` is a folder whose classes, in this order, and hidden layer are the same;
    else its weights are random, drawn from torch's default generator.

    Args:
        name: folder written by ``save_pretrained`` or by this recipe, or a Hugging Face name.
        shape: the size; the width comes with the weights.
        classes: their names, in the order of the logits.

    Raises:
        ConfigError: not found, unreadable, or no MobileNetV2.
    """
    transformers = require("transformers", "images")
    config = load_named(name, transformers.AutoConfig, extra="images")
    check_kind(name, config, kind="mobilenet_v2", example="google/mobilenet_v2_1.0_224")
    trained_for = [config.id2label[number] for number in sorted(config.id2label)]
    with quiet_transformers(extra="images"):
        mobilenet = load_named(
            name,
            transformers.MobileNetV2Model,
            extra="images",
            output_stride=shape.output_stride,
            image_size=shape.size,
            classifier_dropout_prob=shape.dropout,
            **class_names(classes),
        )
    module = with_head(mobilenet, shape, len(classes))
    if trained_for == list(classes):
        _load_head(module, Path(name) / WEIGHTS_FILE)
    return module


def save_mobilenet(model: Model, module: PictureClassifier, folder: Path, *, pixel_range: PixelRange) -> None:
    """Writes the folder. With several workers every one must call it; the chief writes.

    Args:
        model: has the weights.
        module: its module, whose config names the classes.
        folder: is made.
        pixel_range: what the model was trained on.
    """
    model.save_weights(folder / WEIGHTS_FILE)
    run_on_chief(model.strategy.workers, "describe the model", lambda: _describe(module, folder, pixel_range))


def _describe(module: PictureClassifier, folder: Path, pixel_range: PixelRange) -> None:
    config = module.mobilenet_v2.config.to_dict()
    config["architectures"] = [module.architecture]
    atomic_write(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False, default=str) + "\n")
    atomic_write(
        folder / "preprocessor_config.json", json.dumps(_preprocessor(config["image_size"], pixel_range), indent=2)
    )


def _load_head(module: PictureClassifier, weights: Path) -> None:
    """Takes the trained head if the file has one that fits."""
    if not weights.is_file():
        return
    head = {key.removeprefix(_HEAD): value for key, value in read_weights(weights).items() if key.startswith(_HEAD)}
    own = module.classifier.state_dict()
    if {key: value.shape for key, value in head.items()} == {key: value.shape for key, value in own.items()}:
        module.classifier.load_state_dict(head)


def _preprocessor(size: int, pixel_range: PixelRange) -> dict[str, Any]:
    """What transformers' image processor does to a picture so that the model sees what it was trained on."""
    return {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,  # bilinear
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": pixel_range == "centred",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
