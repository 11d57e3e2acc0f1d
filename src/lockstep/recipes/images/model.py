"""MobileNetV2 (Sandler et al. 2018) of transformers, from images to logits.

    images [rows, 3, size, size] -> MobileNetV2Model, average pooling -> [rows, features]
      -> dropout -> (Linear(hidden), ReLU ->) Linear(classes) -> logits [rows, classes]

Without a hidden layer the keys of the state_dict are those of MobileNetV2ForImageClassification: each loads the other's
weights.
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
from lockstep.recipes.from_hub import check_model_type, load_named, quiet_transformers
from lockstep.recipes.images.batches import PixelRange
from lockstep.train.model import Model

_MAX_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class MobileNetShape:
    """The size of a MobileNetV2. The defaults are the published ones, with 2,223,872 parameters without the head.

    Args:
        size: side of the images in pixels; at least ``output_stride``.
        hidden: width of a hidden layer before the classes; 0 for none.
        width_multiplier: factor for the width of all layers.
        output_stride: ratio of image size to the size of the last feature map; 8, 16 or 32.
        dropout: dropout probability of the pooled features. transformers' own default is 0.8, which was TensorFlow's
            probability to keep a feature.
        batch_norm_momentum: weight of a new batch in the running statistics. transformers' own value is 0.997, which
            was TensorFlow's weight of the old statistics; in torch only the last batch would count.
    """

    size: int = 224
    hidden: int = 0
    width_multiplier: float = 1.0
    output_stride: int = 32
    dropout: float = 0.0
    batch_norm_momentum: float = 0.1

    def __post_init__(self) -> None:
        if self.output_stride not in (8, 16, 32):
            raise ConfigError(f"output_stride={self.output_stride} was given; choose one of 8, 16 or 32")
        if not self.output_stride <= self.size <= _MAX_SIZE:
            raise ConfigError(
                f"size={self.size} was given, expected {self.output_stride} to {_MAX_SIZE} pixels: the last feature"
                f" map is output_stride={self.output_stride} times smaller; give a larger size"
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


class ImageClassifier(nn.Module):
    """MobileNetV2 with pooling and a classification head.

    Args:
        mobilenet: a transformers MobileNetV2Model with its pooling layer.
        head: maps pooled features [rows, features] to logits [rows, classes].
        dropout: dropout probability of the pooled features.
    """

    def __init__(self, mobilenet: Any, head: nn.Module, *, dropout: float) -> None:
        super().__init__()
        self.mobilenet_v2 = mobilenet
        self.dropout = nn.Dropout(dropout)
        self.classifier = head

    @property
    def architecture(self) -> str:
        """The class of transformers that can load the weights."""
        plain = isinstance(self.classifier, nn.Linear)
        return "MobileNetV2ForImageClassification" if plain else "MobileNetV2Model"

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] of images [rows, 3, size, size] float32."""
        pooled = self.mobilenet_v2(pixel_values=images).pooler_output
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


def new_mobilenet(shape: MobileNetShape, classes: Sequence[str]) -> ImageClassifier:
    """Returns a model with random weights, drawn from torch's default generator.

    Args:
        shape: size of the model.
        classes: names of the classes, in the order of the logits.
    """
    transformers = require("transformers", "images")
    config = transformers.MobileNetV2Config(
        image_size=shape.size,
        depth_multiplier=shape.width_multiplier,
        output_stride=shape.output_stride,
        classifier_dropout_prob=shape.dropout,
        **_label_names(classes),
    )
    return _with_head(transformers.MobileNetV2Model(config), shape, len(classes))


def _label_names(classes: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}


def _with_head(mobilenet: Any, shape: MobileNetShape, classes: int) -> ImageClassifier:
    """Adds a new head to ``mobilenet`` and sets the momentum of its batch norms."""
    for module in mobilenet.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = shape.batch_norm_momentum
    features: int = mobilenet.conv_1x1.convolution.out_channels
    if shape.hidden:
        hidden, last = nn.Linear(features, shape.hidden), nn.Linear(shape.hidden, classes)
        return ImageClassifier(mobilenet, nn.Sequential(hidden, nn.ReLU(), last), dropout=shape.dropout)
    return ImageClassifier(mobilenet, nn.Linear(features, classes), dropout=shape.dropout)


WEIGHTS_FILE = "model.safetensors"
_HEAD = "classifier."


def load_mobilenet(name: str, shape: MobileNetShape, classes: Sequence[str]) -> ImageClassifier:
    """Loads a trained MobileNetV2 and adds a head for ``classes``.

    The head is the trained one if ``name`` is a folder with the same classes, in this order, and the same hidden layer;
    otherwise its weights are random, drawn from torch's default generator.

    Args:
        name: folder written by ``save_pretrained`` or by this recipe, or a Hugging Face name.
        shape: size of the model, except for its width, which is that of the weights.
        classes: names of the classes, in the order of the logits.

    Raises:
        ConfigError: the model was not found, cannot be read, or is not a MobileNetV2.
    """
    transformers = require("transformers", "images")
    config = load_named(name, transformers.AutoConfig, extra="images")
    check_model_type(name, config, expected="mobilenet_v2", example="google/mobilenet_v2_1.0_224")
    trained_classes = [config.id2label[number] for number in sorted(config.id2label)]
    with quiet_transformers(extra="images"):
        mobilenet = load_named(
            name,
            transformers.MobileNetV2Model,
            extra="images",
            output_stride=shape.output_stride,
            image_size=shape.size,
            classifier_dropout_prob=shape.dropout,
            **_label_names(classes),
        )
    module = _with_head(mobilenet, shape, len(classes))
    if trained_classes == list(classes):
        _load_head(module, Path(name) / WEIGHTS_FILE)
    return module


def _load_head(module: ImageClassifier, weights: Path) -> None:
    """Loads the trained head if the file has one of the same shapes."""
    if not weights.is_file():
        return
    head = {key.removeprefix(_HEAD): value for key, value in read_weights(weights).items() if key.startswith(_HEAD)}
    own = module.classifier.state_dict()
    if {key: value.shape for key, value in head.items()} == {key: value.shape for key, value in own.items()}:
        module.classifier.load_state_dict(head)


def save_mobilenet(model: Model, module: ImageClassifier, folder: Path, *, pixel_range: PixelRange) -> None:
    """Writes a folder that ``load_mobilenet`` and transformers can read. The chief writes; every worker must call it.

    Args:
        model: the trained model.
        module: its module, whose config has the names of the classes.
        folder: the folder; it is created if missing.
        pixel_range: the range of the pixels in training.
    """
    model.save_weights(folder / WEIGHTS_FILE)
    run_on_chief(model.strategy.workers, "write the config", lambda: _save_config(module, folder, pixel_range))


def _save_config(module: ImageClassifier, folder: Path, pixel_range: PixelRange) -> None:
    config = {**module.mobilenet_v2.config.to_dict(), "architectures": [module.architecture]}
    preprocessor = {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "do_resize": True,
        "size": {"height": config["image_size"], "width": config["image_size"]},
        "resample": 2,  # bilinear
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": pixel_range == "centred",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    atomic_write(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False, default=str) + "\n")
    atomic_write(folder / "preprocessor_config.json", json.dumps(preprocessor, indent=2))
