"""MobileNetV2 (Sandler et al. 2018) of transformers, from images to logits.

    images [rows, 3, size, size] -> MobileNetV2Model, average pooling -> [rows, features]
      -> (Linear(hidden), ReLU ->) Linear(classes) -> logits [rows, classes]

Without a hidden layer the keys of the state_dict are those of MobileNetV2ForImageClassification: each loads the other's
weights. Two values of transformers' config come from TensorFlow, where they mean the opposite, and are replaced: a
dropout of 0.8, which was the probability to keep a feature, by none, and a batch norm momentum of 0.997, which was the
weight of the old statistics, by the recipe's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.atomic_files import atomic_write
from lockstep.checkpoint.weights import write_weights
from lockstep.collectives.communicator import run_on_chief
from lockstep.extras import require
from lockstep.train.model import Model
from lockstep_tools.recipes.from_hub import label_names
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.pretrained import PretrainedClassifier


class ImageClassifier(nn.Module):
    """MobileNetV2 with pooling and a head; the config gives hidden layer and batch norm momentum."""

    def __init__(self, mobilenet: Any, config: ImagesConfig, classes: int) -> None:
        super().__init__()
        for module in mobilenet.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = config.batch_norm_momentum
        features: int = mobilenet.conv_1x1.convolution.out_channels
        self.mobilenet_v2 = mobilenet
        hidden = [nn.Linear(features, config.hidden), nn.ReLU()] if config.hidden else []
        last = nn.Linear(config.hidden or features, classes)
        self.classifier = nn.Sequential(*hidden, last) if hidden else last

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] of images [rows, 3, size, size] float32."""
        logits: Tensor = self.classifier(self.mobilenet_v2(pixel_values=images).pooler_output)
        return logits


def new_mobilenet(config: ImagesConfig, classes: Sequence[str]) -> ImageClassifier:
    """Returns a model with random weights, drawn from torch's default generator."""
    transformers = require("transformers", "images")
    settings = transformers.MobileNetV2Config(
        depth_multiplier=config.width_multiplier,
        image_size=config.side,
        output_stride=config.output_stride,
        classifier_dropout_prob=0.0,
        **label_names(classes),
    )
    return ImageClassifier(transformers.MobileNetV2Model(settings), config, len(classes))


def save_classifier(model: Model, module: ImageClassifier | PretrainedClassifier, folder: Path) -> None:
    """Writes a folder that transformers reads. The chief writes; every worker must call it."""
    weights = model.state_dict()
    run_on_chief(model.strategy.workers, "write the model", lambda: _save(weights, module, folder))


def _save(weights: Mapping[str, Tensor], module: ImageClassifier | PretrainedClassifier, folder: Path) -> None:
    if isinstance(module, PretrainedClassifier):
        config, preparation = _pretrained_config(module)
        weights = {name.removeprefix("network."): tensor for name, tensor in weights.items()}
    else:
        config, preparation = _mobilenet_config(module)
    write_weights(weights, folder / "model.safetensors")
    atomic_write(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False, default=str) + "\n")
    atomic_write(folder / "preprocessor_config.json", json.dumps(preparation, indent=2))


def _mobilenet_config(module: ImageClassifier) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = isinstance(module.classifier, nn.Linear)
    architecture = "MobileNetV2ForImageClassification" if plain else "MobileNetV2Model"
    config = {**module.mobilenet_v2.config.to_dict(), "architectures": [architecture]}
    return config, _processor(config["image_size"])


def _pretrained_config(module: PretrainedClassifier) -> tuple[dict[str, Any], dict[str, Any]]:
    network, preparation = module.network, module.preparation
    config = {**network.config.to_dict(), "architectures": [type(network).__name__], "image_size": preparation.size}
    normalized = {"do_normalize": True, "image_mean": list(preparation.mean), "image_std": list(preparation.std)}
    return config, {**_processor(preparation.size), **normalized}


def _processor(size: int) -> dict[str, Any]:
    """The settings of an image processor that prepares images as this recipe does."""
    return {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": 2,  # bilinear
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": False,
    }
