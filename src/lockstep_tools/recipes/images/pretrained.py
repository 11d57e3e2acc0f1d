"""Classifiers of transformers, and those of timm through transformers, as the beginning of a training.

    images [rows, 3, size, size] from 0 to 1 -> normalized as the model was trained -> its network -> logits

The head is replaced unless it has exactly the classes of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep_tools.recipes.from_hub import label_names, load_named, quiet_transformers

_USUAL_SIZE = 224  # pixels, where neither the model nor its processor says


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a pretrained model expects its images.

    Args:
        size: side of the square in pixels.
        mean, std: mean and standard deviation of the channels by which values from 0 to 1 are normalized.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class PretrainedClassifier(nn.Module):
    """A network of transformers that takes images from 0 to 1 and returns logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: Any, preparation: Preparation) -> None:
        super().__init__()
        self.network = network
        self.preparation = preparation
        for name in ("mean", "std"):
            values = torch.tensor(getattr(preparation, name)).view(3, 1, 1)
            # Not part of the state: the saved weights are those of the network alone, which transformers loads.
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] of images [rows, 3, size, size] float32."""
        logits: Tensor = self.network(pixel_values=(images - self.mean) / self.std).logits
        return logits


def load_classifier(
    name: str, classes: Sequence[str], *, batch_norm_momentum: float, size: int | None = None
) -> PretrainedClassifier:
    """Loads a network by folder or Hugging Face name, with a head of these classes.

    A new head is drawn from torch's default generator. ``size`` replaces the model's own.

    Raises:
        ConfigError: it was not found, cannot be read, or is no image classifier.
    """
    transformers = require("transformers", "images")
    with quiet_transformers():
        config = _load(name, transformers.AutoConfig)
        same = list((config.id2label or {}).values()) == list(classes)
        if not same:
            # The number too: a config of timm has one of its own beside the names, which would win.
            config = _load(name, transformers.AutoConfig, num_labels=len(classes), **label_names(classes))
        _drop_num_classes(config)
        network = _load(
            name,
            transformers.AutoModelForImageClassification,
            config=config,
            # The published head may have another number of classes; transformers then draws a new one instead of
            # raising.
            ignore_mismatched_sizes=True,
        )
    if not same:
        # Also a head of as many classes but of other names: its weights say nothing about these.
        _head(network, len(classes)).reset_parameters()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = batch_norm_momentum
    if config.model_type == "mobilenet_v2":  # 0.8 in the published ones: TensorFlow's probability to keep a feature
        network.dropout.p = 0.0
    published = preparation_of(name)
    preparation = Preparation(size=size or published.size, mean=published.mean, std=published.std)
    return PretrainedClassifier(network.train(), preparation)


def preparation_of(name: str) -> Preparation:
    """Returns the size and the normalization with which a model was trained.

    Raises:
        ConfigError: the model has no description of its images, or it cannot be read.
    """
    with quiet_transformers():
        config = _load(name, require("transformers", "images").AutoConfig)
        settings = _timm_settings(config) or _load(name, _ProcessorSettings)
    normalized = settings.get("do_normalize", "image_mean" in settings)
    mean, std = (
        settings[key] if normalized else [default] * 3 for key, default in (("image_mean", 0.0), ("image_std", 1.0))
    )
    return Preparation(size=_size_of(config, settings), mean=tuple(mean), std=tuple(std))


class _ProcessorSettings:
    """The settings of an image processor as a dict; the processors themselves need torchvision."""

    @staticmethod
    def from_pretrained(name: str, **settings: Any) -> dict[str, Any]:
        base = require("transformers.image_processing_base", "images").ImageProcessingMixin
        loaded: dict[str, Any] = base.get_image_processor_dict(name, **settings)[0]
        return loaded


def _drop_num_classes(config: Any) -> None:
    """Removes the number of classes from the arguments with which a model of timm is made; other models have none.

    timm 1.0.31 saves it among them, and transformers 5.23 gives it once more by itself, which is a TypeError.
    """
    (getattr(config, "model_args", None) or {}).pop("num_classes", None)


def _timm_settings(config: Any) -> dict[str, Any]:
    """The description of images that timm's models carry in their config; empty for other models."""
    timm: Mapping[str, Any] = getattr(config, "pretrained_cfg", None) or {}
    if not timm:
        return {}
    size = {"height": timm["input_size"][-1]}
    return {"size": size, "image_mean": timm["mean"], "image_std": timm["std"], "do_normalize": True}


def _size_of(config: Any, settings: Mapping[str, Any]) -> int:
    """The side of the square: of the processor's crop, else of the model, else of the processor's resizing."""
    crop = settings.get("crop_size") if settings.get("do_center_crop") else None
    for size in (crop, getattr(config, "image_size", None), settings.get("size")):
        side = size.get("height", size.get("shortest_edge")) if isinstance(size, Mapping) else size
        if isinstance(side, int):
            return side
    return _USUAL_SIZE


def _head(network: nn.Module, classes: int) -> nn.Linear:
    """The last linear layer, which has an output for each class."""
    layers = [
        module for module in network.modules() if isinstance(module, nn.Linear) and module.out_features == classes
    ]
    if not layers:
        raise ConfigError(
            f"the pretrained {type(network).__name__} has no linear layer with an output for each of the {classes}"
            " classes; expected an image classifier with a linear head"
        )
    return layers[-1]


def _load(name: str, kind: Any, **settings: Any) -> Any:
    try:
        return load_named(name, kind, **settings)
    except ImportError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"pretrained={name!r} needs a package that is not there ({reason}); for models of timm: pip install timm"
        ) from error
