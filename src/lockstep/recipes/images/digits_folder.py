"""The digits as a tree of PNG files: train/0 ... train/9 and test/0 ... test/9, whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from lockstep.errors import DataError
from lockstep.recipes.images.digits import read_digits


def write_digits(folder: Path) -> dict[str, int]:
    """Writes the digits, each at its own 8x8; returns how many went into each part.

    They are written beside ``folder`` and renamed, so that it never holds a part of them. A run with ``data=folder``
    sees the very pixels that a run without data sees.

    Args:
        folder: is made; an empty one is taken.

    Raises:
        DataError: there is something there already, or it cannot be written.
    """
    digits = read_digits()
    _check_free(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        for path, image in digits.images.items():
            (partial / path).parent.mkdir(parents=True, exist_ok=True)
            image.save(partial / path)
        partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"the digits cannot be written to {str(folder)!r} ({(error.strerror or str(error)).lower()}), expected a"
            " place to write to; give another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {part: len(pictures) for part, pictures in digits.parts.items()}


def _check_free(folder: Path) -> None:
    try:
        taken = any(folder.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise DataError(f"{str(folder)!r} is a file, expected a new or an empty folder; give another one") from error
    except OSError as error:
        raise DataError(
            f"{str(folder)!r} cannot be read ({error.strerror}), expected a new or an empty folder"
        ) from error
    if taken:
        raise DataError(f"the folder {str(folder)!r} is not empty, expected a new or an empty one; give another one")
