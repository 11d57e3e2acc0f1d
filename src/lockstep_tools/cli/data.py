"""``lockstep data digits``: writes the embedded digits as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep_tools.cli.app import COMMANDS
from lockstep_tools.cli.flags import CommandsHelp, command
from lockstep_tools.recipes.images.dataset import write_digits

_EXAMPLE = "Example: lockstep data digits digits"


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep data`` and its command."""
    data = typer.Typer(cls=CommandsHelp)
    data.callback()(_data_help)
    data.command("digits", epilog=_EXAMPLE)(command(DataDigits))
    app.add_typer(data, name="data", help=COMMANDS["data"], epilog=_EXAMPLE)


def _data_help() -> None:
    """Write the data that is embedded in a package as files."""


@dataclass(frozen=True, kw_only=True)
class DataDigits:
    """Write scikit-learn's digits as PNG files: DIR/train/0 ... 9 and DIR/test/0 ... 9.

    Args:
        folder: a new or an empty folder.
    """

    folder: Annotated[Path, typer.Argument(metavar="DIR")]

    def __call__(self) -> int:
        written = write_digits(self.folder.expanduser())
        counts = ", ".join(f"{split} {number:,}" for split, number in written.items())
        print(f"digits written to {self.folder}: {counts}")
        print(f"to train on them: lockstep train images --data {self.folder}")
        return 0
