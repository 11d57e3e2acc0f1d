"""All pictures of a run as one array, decoded once: in worker processes, or in this one.

The workers are those of torch's DataLoader: they end with the iteration, on an error and on Ctrl-C too, and by
themselves when this process is gone. Epochs read the array: no picture is decoded twice, no process started again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.atomic_files import atomic_file
from lockstep.errors import DataError
from lockstep.extras import require

FORMATS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif"})
"""Suffixes of pictures, in lower case; of an animation the first frame is taken."""


def decode_file(path: Path, size: int) -> Any:
    """The picture in a file, as ``prepare`` gives it, or the reason as a text why it cannot be had.

    Args:
        path: a file of one of ``FORMATS``; what it holds decides, not its name.
        size: side of the result, in pixels.
    """
    return _opened(path, partial(_reduced, size=size))


def inspect_file(path: Path) -> tuple[int, int] | str:
    """Width and height of the picture in a file as it is stored, or the reason why it cannot be decoded."""
    size: tuple[int, int] | str = _opened(path, _checked_size)
    return size


def _opened(path: Path, use: Callable[[Any], Any]) -> Any:
    """What ``use`` returns for the open picture, or the reason as a text."""
    pillow = require("PIL.Image", "images")
    # What Pillow and its plugins raise for files that are cut short, mislabelled or damaged:
    broken = (OSError, SyntaxError, ValueError, EOFError, struct.error, pillow.DecompressionBombError)
    odd = (IndexError, KeyError, TypeError, ZeroDivisionError, OverflowError, MemoryError)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, which does not touch the pixels
            with pillow.open(path) as image:
                return use(image)
    except (*broken, *odd) as error:
        return _reason(path, error)


def _reduced(image: Any, size: int) -> Any:
    # A JPEG is then decoded at a half, quarter or eighth, as long as twice the wanted side is left.
    image.draft("RGB", (2 * size, 2 * size))
    return prepare(image, size)


def _checked_size(image: Any) -> tuple[int, int]:
    width, height = image.size
    _reduced(image, 1)  # cut off and damaged pictures show only when all of them is read
    return width, height


def prepare(image: Any, size: int) -> Any:
    """The picture upright, in RGB, resized to a square without keeping its proportions (bilinear, all pixels count).

    Transparent pixels become white; pictures of 16 bits a channel are brought to 8.

    Args:
        image: a Pillow image.
        size: side of the result, in pixels.

    Returns:
        A numpy array [size, size, 3] uint8.
    """
    numpy, pillow = require("numpy", "images"), require("PIL.Image", "images")
    upright = _rgb(_upright(image))
    return numpy.asarray(upright.resize((size, size), pillow.Resampling.BILINEAR), dtype=numpy.uint8)


def _upright(image: Any) -> Any:
    """Turned as the camera noted in its EXIF data; damaged EXIF data notes nothing."""
    try:
        return require("PIL.ImageOps", "images").exif_transpose(image)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, KeyError, TypeError, ZeroDivisionError):
        return image


def _rgb(image: Any) -> Any:
    pillow = require("PIL.Image", "images")
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would cut off at 255
        numpy = require("numpy", "images")
        grey = numpy.asarray(image).astype(numpy.int64).clip(0, 65535) // 257
        image = pillow.fromarray(grey.astype(numpy.uint8))
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        white = pillow.new("RGBA", transparent.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(white, transparent)
    return image.convert("RGB")


def _reason(path: Path, error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, OSError) and path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, require("PIL", "images").UnidentifiedImageError):
        return "no picture"
    return " ".join(str(error).split())[:120] or type(error).__name__


Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Told how many pictures are decoded, of how many."""

_AT_ONCE = 16  # pictures that a worker hands over together
_MEMORY_SHARE = 0.8  # of the memory that is free; the model and its batches need some too


@dataclass(frozen=True, kw_only=True)
class PixelStore:
    """Pixels of pictures, and those that could not be had.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8; the rows of broken pictures are 0.
        broken: place of a broken picture -> the reason.
        file: where the pixels lie; None is in memory.
    """

    pixels: Any
    broken: Mapping[int, str]
    file: Path | None = None

    @property
    def kept(self) -> str:
        """Where the pixels are and how much room they take, in words for a person."""
        place = "in memory" if self.file is None else f"in {self.file}"
        return f"{said_size(self.pixels.nbytes)} decoded {place}"


def memory_store(paths: Sequence[Path], *, size: int, workers: int, progress: Progress | None = None) -> PixelStore:
    """The pictures in the memory of this process.

    Raises:
        DataError: they do not fit.
    """
    needed, free = len(paths) * size * size * 3, _free_memory()
    if free is not None and needed > _MEMORY_SHARE * free:
        raise DataError(
            f"{len(paths):,} pictures of {size}x{size} take {said_size(needed)} decoded, expected at most"
            f" {_MEMORY_SHARE:.0%} of the {said_size(free)} of memory that are free;"
            ' give cache="disk" (--cache disk) or a smaller size'
        )
    pixels = require("numpy", "images").zeros((len(paths), size, size, 3), dtype="uint8")
    return PixelStore(pixels=pixels, broken=decode_into(pixels, paths, workers=workers, progress=progress))


def decode_into(
    pixels: Any, paths: Sequence[Path], *, workers: int, progress: Progress | None = None
) -> dict[int, str]:
    """Decodes the files into ``pixels``, in order; returns place -> reason for those that are broken.

    Args:
        pixels: numpy array [pictures, size, size, 3] uint8 to fill.
        paths: as many files.
        workers: processes that decode; 0 decodes here.
        progress: told after each picture.

    Raises:
        DataError: a worker died.
    """
    broken: dict[int, str] = {}
    decode = partial(decode_file, size=pixels.shape[1])
    with closing(in_workers(decode, paths, workers=workers)) as results:
        for place, result in enumerate(results):
            if isinstance(result, str):
                broken[place] = result
            else:
                pixels[place] = result
            if progress is not None:
                progress(place + 1, len(paths))
    return broken


def in_workers(
    function: Callable[[Path], Result], paths: Sequence[Path], *, workers: int
) -> Generator[Result, None, None]:
    """What ``function`` returns for each path, in order. Close the generator, or read it to its end.

    Args:
        function: runs in the workers; what it returns is sent here.
        paths: the files.
        workers: processes; 0 runs it here. Few files take fewer.

    Raises:
        DataError: a worker died.
    """
    loader = DataLoader(
        _Results(function, paths),
        batch_size=_AT_ONCE,
        num_workers=min(workers, -(-len(paths) // _AT_ONCE)),
        collate_fn=list,
        generator=torch.Generator(),  # else the loader draws from the caller's random numbers
    )
    try:
        for results in loader:
            yield from results
    except RuntimeError as error:
        raise DataError(f"a process that decodes pictures died ({error}); try fewer workers, or --workers 0") from error


def said_size(length: int) -> str:
    """A number of bytes for a person: ``5.5 MB``, ``3.8 GB``."""
    return f"{length / 1e9:.1f} GB" if length >= 1e9 else f"{length / 1e6:.1f} MB"


def _free_memory() -> int | None:
    """Bytes that the machine can give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


class _Results(Dataset[Result]):
    def __init__(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> None:
        self._function = function
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> Result:
        return self._function(self._paths[place])


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
