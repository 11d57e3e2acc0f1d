"""``lockstep train``: one command for each recipe, one file for each command."""

from __future__ import annotations

import typer

from lockstep.cli.flags import config_command
from lockstep.cli.train_images import IMAGES_EXAMPLE, images
from lockstep.cli.train_mlm import MLM_EXAMPLE, mlm
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.mlm.config import MlmConfig


def train_app() -> typer.Typer:
    """The commands under ``lockstep train``."""
    app = typer.Typer()
    app.callback()(_train)
    app.command("mlm", epilog=MLM_EXAMPLE)(config_command(MlmConfig)(mlm))
    app.command("images", epilog=IMAGES_EXAMPLE)(config_command(ImagesConfig)(images))
    return app


def _train() -> None:
    """Train one of the recipes."""
