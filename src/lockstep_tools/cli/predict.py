"""``lockstep predict``: classes of new images, with a model that ``lockstep train images`` has written."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep import console
from lockstep.atomic_files import atomic_file, atomic_write
from lockstep.checks import UNBOUNDED, check_number
from lockstep.errors import ConfigError
from lockstep.extras import find_package
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.cli.app import COMMANDS
from lockstep_tools.cli.devices import declared_workers, take_devices
from lockstep_tools.cli.flags import DevicesFlag, FolderFlag, check_file, check_folder, command
from lockstep_tools.recipes.images.predict import (
    Predictions,
    draw_contact_sheet,
    find_files,
    load_trained,
    predict_files,
    render_table,
)

TABLE, SHEET = "predictions.csv", "contact-sheet.png"


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep predict``."""
    example = "Example: lockstep predict runs/images photos --output runs/photos"
    app.command("predict", epilog=example, help=COMMANDS["predict"])(command(Predict))


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify images with a trained model, and write a table and a contact sheet.

    --output gets predictions.csv, with the class and the probability of each class of each file, and contact-sheet.png,
    with the pictures of which the model is least certain first. Files that cannot be read are at the end of the table.

    Args:
        model: the folder of a run of lockstep train images, its model folder, or an image classifier by Hugging Face
            name.
        paths: image files, and folders of them.
        devices: how to divide the devices.
        output: folder for the table and the contact sheet.
        overwrite: replace the table and the contact sheet of an earlier command.
        batch_size: images in a global batch.
    """

    model: Annotated[str, typer.Argument(metavar="MODEL")]
    paths: Annotated[list[Path], typer.Argument(metavar="IMAGES")]
    devices: DevicesFlag = None
    output: FolderFlag = Path("runs/predictions")
    overwrite: bool = False
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_number("batch_size", self.batch_size, least=1, most=UNBOUNDED, whole=True, optional=False)

    def __call__(self) -> int:
        if (workers := declared_workers() or 1) > 1:
            raise ConfigError(
                f"lockstep predict runs in one process, and the environment declares {workers} workers, which would all"
                " write the same files; run it without lockstep run"
            )
        output = self.output.expanduser()
        # Before the model is loaded and the images are read: what is wrong with --output is told at once.
        self._check_output(output)
        find_package("PIL", "images")
        classifier = load_trained(self.model)
        files = find_files([path.expanduser() for path in self.paths])
        devices = take_devices(self.devices)
        with closing(MirroredStrategy(devices, seed=0)) as strategy:
            predictions = predict_files(classifier, files, strategy, batch_size=self.batch_size)
        with atomic_file(output / SHEET) as partial:
            draw_contact_sheet(predictions).save(partial, format="PNG")
        atomic_write(output / TABLE, render_table(predictions))
        print(_overview(predictions))
        print(f"\ntable  {output / TABLE}\nsheet  {output / SHEET}")
        return 0

    def _check_output(self, output: Path) -> None:
        check_folder(output)
        for name in (TABLE, SHEET):
            check_file(output / name)
            if (output / name).exists() and not self.overwrite:
                raise ConfigError(
                    f"--output has the predictions of another command, {str(output / name)!r}; give another --output,"
                    " or --overwrite to replace them"
                )


def _overview(predictions: Predictions) -> str:
    """How many images have each class, and which files cannot be read."""
    likeliest = predictions.probabilities.argmax(dim=1)
    counts = likeliest.bincount(minlength=len(predictions.classes)).tolist()
    rows = [[name, f"{count:,}"] for name, count in zip(predictions.classes, counts, strict=True) if count]
    table = console.text_table(["class", "images"], rows)
    first = [f"\nnot read: {path} ({reason})" for path, reason in list(predictions.broken.items())[:10]]
    broken = "".join(first).encode(errors="backslashreplace").decode()  # a name may be bytes that are not UTF-8
    rest = len(predictions.broken) - 10
    return table + broken + (f"\nand {rest:,} more, which the table lists" if rest > 0 else "")
