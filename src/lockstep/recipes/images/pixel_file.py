"""Decoded pictures on disk: one file for each tree and size, mapped into memory, and made anew when a picture changes.

    pixels [pictures, size, size, 3] uint8 | footer (JSON: key, shape, broken pictures) | length of the footer, 8 bytes

It appears whole or not at all. Its key is made of all that decides the pixels: this format, the versions of Pillow and
numpy, the size, and of every picture name, length, and times of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.atomic_files import atomic_file
from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.pixels import PixelStore, Progress, decode_into, said_size

_FORMAT = 1
_LENGTH_BYTES = 8


def disk_store(
    paths: Sequence[Path], *, root: Path, size: int, workers: int, folder: Path, progress: Progress | None = None
) -> PixelStore:
    """The pictures in a file of ``folder``: as a run before has left it, or decoded now.

    Args:
        paths: the pictures.
        root: the tree that they belong to; each tree has one file for each size.
        size: side of a picture, in pixels.
        workers: processes that decode.
        folder: where the file is; it is made.
        progress: told how many pictures are decoded.

    Raises:
        DataError: the file cannot be written, or there is no room for it.
    """
    shape = (len(paths), size, size, 3)
    place = hashlib.sha256(f"{root.resolve()}\0{size}".encode()).hexdigest()
    file, key = folder / f"pictures-{place[:16]}.pixels", cache_key(paths, root=root, size=size)
    kept = _read(file, key, shape)
    if kept is not None:
        return kept
    try:
        _write(file, key, shape, lambda pixels: decode_into(pixels, paths, workers=workers, progress=progress))
    except OSError as error:
        raise DataError(
            f"the decoded pictures cannot be kept in {str(folder)!r} ({error.strerror or error}), expected a folder to"
            ' write to; give another one as cache_dir, or cache="memory"'
        ) from error
    made = _read(file, key, shape)
    if made is None:
        raise DataError(f"{str(file)!r} was replaced by another run while this one made it; run again, one at a time")
    return made


def cache_key(paths: Sequence[Path], *, root: Path, size: int) -> str:
    """A hash of all that decides the pixels, without reading a picture: replaced and edited ones have other times."""
    versions = [require(name, "images").__version__ for name in ("PIL", "numpy")]
    digest = hashlib.sha256(json.dumps([_FORMAT, versions, size]).encode())
    for path in paths:
        seen = path.stat()
        digest.update(f"\0{path.relative_to(root)}\0{seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}".encode())
    return digest.hexdigest()


def _write(file: Path, key: str, shape: tuple[int, ...], fill: Callable[[Any], dict[int, str]]) -> None:
    numpy = require("numpy", "images")
    length = int(numpy.prod(shape, dtype="int64"))
    with atomic_file(file) as partial:
        _check_room(file.parent, length)
        with partial.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, length)  # a mapped file that finds no room ends the process
        pixels = numpy.memmap(partial, dtype="uint8", mode="r+", shape=shape)
        broken = fill(pixels)
        pixels.flush()
        footer = json.dumps({"key": key, "shape": shape, "broken": broken}).encode()
        with partial.open("ab") as opened:
            opened.write(footer + len(footer).to_bytes(_LENGTH_BYTES, "little"))


def _read(file: Path, key: str, shape: tuple[int, ...]) -> PixelStore | None:
    """What the file holds, or None where there is none, or one of other pictures, or a damaged one."""
    try:
        footer = _footer(file)
    except (OSError, ValueError):
        return None
    if not isinstance(footer, dict) or footer.get("key") != key or footer.get("shape") != list(shape):
        return None
    pixels = require("numpy", "images").memmap(file, dtype="uint8", mode="r", shape=shape)
    return PixelStore(
        pixels=pixels, broken={int(place): reason for place, reason in footer["broken"].items()}, file=file
    )


def _footer(file: Path) -> Any:
    with file.open("rb") as opened:
        opened.seek(-_LENGTH_BYTES, os.SEEK_END)
        length = int.from_bytes(opened.read(), "little")
        opened.seek(-_LENGTH_BYTES - length, os.SEEK_END)
        return json.loads(opened.read(length))


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the decoded pictures take {said_size(needed)}, and {str(folder)!r} has {said_size(free)} free;"
            " give another cache_dir or a smaller size"
        )
