"""MobileNetV2 (Sandler et al. 2018) of transformers, from images to logits.

    images [rows, 3, size, size] -> MobileNetV2Model, average pooling -> [rows, features]
      -> dropout -> (Linear(hidden), ReLU ->) Linear(classes) -> logits [rows, classes]

Without a hidden layer the keys of the state_dict are those of MobileNetV2ForImageClassification: each loads the other's
weights. Two values of transformers' config come from TensorFlow, where they mean the opposite, and are replaced by the
recipe's: a dropout of 0.8, which was the probability to keep a feature, and a batch norm momentum of 0.997, which was
the weight of the old statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.atomic_files import atomic_write
from lockstep.checkpoint.weights import read_weights
from lockstep.collectives.communicator import run_on_chief
from lockstep.extras import require
from lockstep.recipes.from_hub import check_model_type, label_names, load_named, quiet_transformers
from lockstep.recipes.images.config import ImagesConfig, PixelRange
from lockstep.train.model import Model

WEIGHTS_FILE = "model.safetensors"
_HEAD = "classifier."


class ImageClassifier(nn.Module):
    """MobileNetV2 with pooling and a head; the config gives hidden layer, dropout and batch norm momentum."""

    def __init__(self, mobilenet: Any, config: ImagesConfig, classes: int) -> None:
        super().__init__()
        for module in mobilenet.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = config.batch_norm_momentum
        features: int = mobilenet.conv_1x1.convolution.out_channels
        self.mobilenet_v2 = mobilenet
        self.dropout = nn.Dropout(config.dropout)
        hidden = [nn.Linear(features, config.hidden), nn.ReLU()] if config.hidden else []
        last = nn.Linear(config.hidden or features, classes)
        self.classifier = nn.Sequential(*hidden, last) if hidden else last

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] of images [rows, 3, size, size] float32."""
        pooled = self.mobilenet_v2(pixel_values=images).pooler_output
        logits: Tensor = self.classifier(self.dropout(pooled))
        return logits


def new_mobilenet(config: ImagesConfig, classes: Sequence[str]) -> ImageClassifier:
    """Returns a model with random weights, drawn from torch's default generator."""
    transformers = require("transformers", "images")
    settings = transformers.MobileNetV2Config(depth_multiplier=config.width_multiplier, **_settings(config, classes))
    return ImageClassifier(transformers.MobileNetV2Model(settings), config, len(classes))


def _settings(config: ImagesConfig, classes: Sequence[str]) -> dict[str, Any]:
    return {
        "image_size": config.size,
        "output_stride": config.output_stride,
        "classifier_dropout_prob": config.dropout,
        **label_names(classes),
    }


def load_mobilenet(name: str, config: ImagesConfig, classes: Sequence[str]) -> ImageClassifier:
    """Loads a trained MobileNetV2, whose width is that of its weights, and adds a head for ``classes``.

    The head is the trained one if ``name`` is a folder with the same classes, in this order, and the same hidden layer;
    otherwise its weights are random, drawn from torch's default generator.

    Raises:
        ConfigError: the model was not found, cannot be read, or is not a MobileNetV2.
    """
    transformers = require("transformers", "images")
    trained = load_named(name, transformers.AutoConfig, extra="images")
    check_model_type(name, trained, expected="mobilenet_v2", example="google/mobilenet_v2_1.0_224")
    trained_classes = [trained.id2label[number] for number in sorted(trained.id2label)]
    with quiet_transformers(extra="images"):
        kind = transformers.MobileNetV2Model
        mobilenet = load_named(name, kind, extra="images", **_settings(config, classes))
    module = ImageClassifier(mobilenet, config, len(classes))
    weights = Path(name) / WEIGHTS_FILE
    if trained_classes == list(classes) and weights.is_file():
        head = {key.removeprefix(_HEAD): value for key, value in read_weights(weights).items() if key.startswith(_HEAD)}
        own = module.classifier.state_dict()
        if {key: value.shape for key, value in head.items()} == {key: value.shape for key, value in own.items()}:
            module.classifier.load_state_dict(head)
    return module


def save_mobilenet(model: Model, module: ImageClassifier, folder: Path, *, pixel_range: PixelRange) -> None:
    """Writes a folder that ``load_mobilenet`` and transformers read. The chief writes; every worker must call it."""
    model.save_weights(folder / WEIGHTS_FILE)
    run_on_chief(model.strategy.workers, "write the config", lambda: _save_config(module, folder, pixel_range))


def _save_config(module: ImageClassifier, folder: Path, pixel_range: PixelRange) -> None:
    plain = isinstance(module.classifier, nn.Linear)
    architecture = "MobileNetV2ForImageClassification" if plain else "MobileNetV2Model"
    config = {**module.mobilenet_v2.config.to_dict(), "architectures": [architecture]}
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
