"""The recipes that ``lockstep bench scaling`` can measure: module, batches, optimizer and loss, at any batch size.

The learning rate stays at its first value: what a step costs does not depend on it. A recipe's packages are imported
when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.mlm.config import MlmConfig


class Batches(Protocol):
    """Global batches (x, y) in the order of an epoch."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int, /) -> None:
        """Makes the next iteration that epoch's."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process trains."""

    source: str  # where the data came from
    module: nn.Module  # on the CPU, with seeded weights
    train: Batches
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[[Any, Any], Any]  # of (outputs, y), in any form that ``Model.compile`` takes
    sync_batchnorm: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe that can be measured."""

    name: str  # as on the command line
    config: type[Any]  # its dataclass, which has a ``batch_size``
    title: Callable[[Any], str]  # from a config to what is trained, in words
    build: Callable[[Any], Work]
    # Fields of the config that the measurement sets or does not use, and that are therefore no flags.
    fixed: frozenset[str] = frozenset({"batch_size", "epochs", "patience", "precision", "accumulate", "clip_norm"})


def build_work(recipe: str, config: Any, batch_size: int) -> Work:
    """The work of a recipe at a global batch size."""
    return find_recipe(recipe).build(replace(config, batch_size=batch_size))


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; raises ConfigError if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe is called {name!r}; choose from {', '.join(RECIPES)}")
    return RECIPES[name]


def _images(config: ImagesConfig) -> Work:
    from lockstep.recipes.images.train import build_images, build_optimizer, image_loss

    task = build_images(config)
    return Work(
        source=task.dataset.source,
        module=task.module,
        train=task.train,
        make_optimizer=lambda parameters: build_optimizer(config, parameters),
        loss=image_loss,
        sync_batchnorm=config.sync_batchnorm,
    )


def _images_title(config: ImagesConfig) -> str:
    width = "" if config.width_multiplier == 1 else f", width {config.width_multiplier:g}"
    return f"MobileNetV2{width}, images of {config.size}x{config.size}, Adam, fp32"


def _mlm(config: MlmConfig) -> Work:
    from lockstep.recipes.mlm.model import masked_token_loss
    from lockstep.recipes.mlm.train import build_mlm, build_optimizer

    task = build_mlm(config)
    return Work(
        source=task.text.source,
        module=task.module,
        train=task.train,
        make_optimizer=lambda parameters: build_optimizer(config, parameters),
        loss=masked_token_loss,
    )


def _mlm_title(config: MlmConfig) -> str:
    size = f"{config.layers} layers of width {config.hidden}" if config.pretrained is None else config.pretrained
    return f"masked language model, BERT ({size}), sequences of at most {config.sequence_length} tokens, Adam, fp32"


RECIPES: Mapping[str, Recipe] = {
    "images": Recipe(name="images", config=ImagesConfig, title=_images_title, build=_images),
    "mlm": Recipe(name="mlm", config=MlmConfig, title=_mlm_title, build=_mlm),
}
