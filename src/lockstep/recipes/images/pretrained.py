"""A MobileNetV2 to begin with, by folder or Hugging Face name, and the folder that a run leaves.

    FOLDER/model.safetensors, config.json (sizes, names of the classes), preprocessor_config.json (size and range of
    the pixels): what transformers' MobileNetV2ForImageClassification and its image processor load

With a hidden layer before the classes transformers loads the MobileNetV2Model in it; this recipe loads all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.atomic_files import atomic_write
from lockstep.checkpoint.weights import read_weights
from lockstep.collectives.values import on_chief
from lockstep.extras import require
from lockstep.recipes.hub import check_kind, load_named
from lockstep.recipes.images.batches import PixelRange
from lockstep.recipes.images.model import MobileNetShape, PictureClassifier, class_names, with_head
from lockstep.recipes.quiet import quiet_transformers
from lockstep.train.model import Model

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
    on_chief(model.strategy.workers, "describe the model", lambda: _describe(module, folder, pixel_range))


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
