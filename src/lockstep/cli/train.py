"""``lockstep train``: one command for each recipe, one file for each command."""

from __future__ import annotations

import typer

from lockstep.cli.batch_size import training_command
from lockstep.cli.flags import config_command
from lockstep.cli.grid import GridFlags
from lockstep.cli.train_images import IMAGES_EXAMPLE, images
from lockstep.cli.train_mlm import MLM_EXAMPLE, mlm
from lockstep.cli.train_reviews import REVIEWS_EXAMPLE, reviews
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.train import largest_images_batch
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.train import largest_mlm_batch
from lockstep.recipes.reviews.config import ReviewsConfig


def train_app() -> typer.Typer:
    """The commands under ``lockstep train``."""
    app = typer.Typer()
    app.callback()(_train)
    with_lines = training_command(MlmConfig, largest_mlm_batch, noun="line")
    app.command("mlm", epilog=MLM_EXAMPLE)(config_command(GridFlags, name="grid")(with_lines(mlm)))
    with_pictures = training_command(ImagesConfig, largest_images_batch, noun="picture")
    app.command("images", epilog=IMAGES_EXAMPLE)(with_pictures(images))
    app.command("reviews", epilog=REVIEWS_EXAMPLE)(config_command(ReviewsConfig)(reviews))
    return app


def _train() -> None:
    """Train one of the recipes."""
