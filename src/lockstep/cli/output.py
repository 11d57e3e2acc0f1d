"""Whether results can be put where ``--output`` says: seen before hours of work, and without writing."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import ConfigError


def check_folder(folder: Path) -> None:
    """Refuses a folder that could not be written to, or could not be made.

    Raises:
        ConfigError: a file is in its place, or its permissions forbid it.
    """
    present = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not present.is_dir():
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} is a file, expected a folder;"
            " give another name or move it away"
        )
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} cannot be written to;"
            " give another name or change its permissions"
        )


def check_file(file: Path) -> None:
    """Refuses a file in whose place there is a folder.

    Raises:
        ConfigError: there is.
    """
    if file.is_dir():
        raise ConfigError(f"--output has a folder {str(file)!r}, expected a file; move it away")


def check_output(output: Path) -> None:
    """Checks that a training can write its results to ``output``, without writing anything.

    Raises:
        ConfigError: a file is in the place of a folder, a folder in the place of a file, or permissions forbid it.
    """
    for folder in (output, output / "logs", output / "model"):
        check_folder(folder)
    check_file(output / "curves.png")
