"""``lockstep data``: what the data of a recipe holds, without training on it; one file for each recipe."""

from __future__ import annotations

import typer

from lockstep.cli.data_images import digits, images
from lockstep.cli.data_mlm import mlm
from lockstep.cli.data_reviews import reviews


def data_app() -> typer.Typer:
    """The commands under ``lockstep data``."""
    app = typer.Typer()
    app.callback()(_data)
    app.command("mlm", epilog="Example: lockstep data mlm --text wikitext-2 --lines 3")(mlm)
    app.command("images", epilog="Example: lockstep data images --data flower_photos")(images)
    app.command("reviews", epilog="Example: lockstep data reviews --csv hotel.csv --encoding gb18030")(reviews)
    app.command("digits", epilog="Example: lockstep data digits digits")(digits)
    return app


def _data() -> None:
    """Say what the data of a recipe holds, or write the embedded pictures."""
