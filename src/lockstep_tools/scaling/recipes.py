"""The recipes that ``lockstep bench scaling`` can measure, at any batch size.

The learning rate stays at its first value: what a step costs does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.train import build_images
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.train import build_mlm
from lockstep_tools.recipes.training import Task


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe that can be measured."""

    name: str  # as on the command line
    config: type[Any]  # its dataclass, which has a ``batch_size``
    title: Callable[[Any], str]  # from a config to what is trained, in words
    build: Callable[[Any], Task]
    # Fields of the config that the measurement sets or does not use, and that are therefore no flags.
    fixed: frozenset[str] = frozenset({"batch_size", "epochs", "patience", "precision", "accumulate", "clip_norm"})


def _images_title(config: ImagesConfig) -> str:
    width = "" if config.width_multiplier == 1 else f", width {config.width_multiplier:g}"
    return f"MobileNetV2{width}, images of {config.side}x{config.side}, Adam, fp32"


def _mlm_title(config: MlmConfig) -> str:
    size = f"{config.layers} layers of width {config.hidden}" if config.pretrained is None else config.pretrained
    return f"masked language model, BERT ({size}), sequences of at most {config.sequence_length} tokens, Adam, fp32"


RECIPES: Mapping[str, Recipe] = {
    "images": Recipe(name="images", config=ImagesConfig, title=_images_title, build=build_images),
    "mlm": Recipe(name="mlm", config=MlmConfig, title=_mlm_title, build=build_mlm),
}
