"""Decoding images, once per run: into an array in memory, or into a file on disk that later runs map into memory.

Worker processes of torch's DataLoader decode; they end with the iteration, on errors and on Ctrl-C too, and by
themselves when the main process is gone. Epochs read the array: no image is decoded twice and no process started again.

    file on disk: pixels [images, size, size, 3] uint8 | JSON footer: key, shape, broken images | length of the footer

The key is a hash of everything that decides the pixels: this format, the versions of Pillow and numpy, the size, and
the name, length and times of change of each image.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
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
"""Suffixes of image files, in lower case; of an animation the first frame is used."""
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError, KeyError, TypeError),
    *(ZeroDivisionError, OverflowError, MemoryError),
)
"""What Pillow and its plugins raise for truncated, mislabelled or damaged files."""

Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with the number of decoded images and of all images."""

_CHUNK = 16  # images that a worker sends together
_MEMORY_FRACTION = 0.8  # of the free memory; the model and its batches need some too
_FILE_FORMAT = 1
_LENGTH_BYTES = 8


def decode_file(path: Path, size: int) -> Any:
    """Returns the image in a file as ``to_square`` does, or the reason (a str) why it cannot be decoded."""
    return _with_image(path, partial(_reduced, size=size))


def inspect_file(path: Path) -> tuple[int, int] | str:
    """Returns width and height of an image as stored, or the reason why it cannot be decoded."""
    size: tuple[int, int] | str = _with_image(path, _checked_size)
    return size


def _with_image(path: Path, use: Callable[[Any], Any]) -> Any:
    pillow = require("PIL.Image", "images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, which does not affect the pixels
            with pillow.open(path) as image:
                return use(image)
    except (*_DAMAGE, pillow.DecompressionBombError) as error:
        return _reason(path, error)


def _reason(path: Path, error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, OSError) and path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, require("PIL", "images").UnidentifiedImageError):
        return "not an image"
    return " ".join(str(error).split())[:120] or type(error).__name__


def _reduced(image: Any, size: int) -> Any:
    # A JPEG is then decoded at 1/2, 1/4 or 1/8 of its size, as long as that is at least twice the needed size.
    image.draft("RGB", (2 * size, 2 * size))
    return to_square(image, size)


def _checked_size(image: Any) -> tuple[int, int]:
    width, height = image.size
    _reduced(image, 1)  # truncated and damaged images show only when all of the file is read
    return width, height


def to_square(image: Any, size: int) -> Any:
    """Returns a Pillow image as a numpy array [size, size, 3] uint8: upright, RGB, resized without keeping proportions.

    Resizing is bilinear and antialiased. Transparent pixels become white; 16 bits per channel are reduced to 8.
    """
    numpy, pillow = require("numpy", "images"), require("PIL.Image", "images")
    with suppress(*_DAMAGE):  # of damaged EXIF data, where the orientation is not known
        image = require("PIL.ImageOps", "images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip at 255
        grey = numpy.asarray(image).astype(numpy.int64).clip(0, 65535) // 257
        image = pillow.fromarray(grey.astype(numpy.uint8))
    if image.has_transparency_data:
        transparent = image.convert("RGBA")
        white = pillow.new("RGBA", transparent.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(white, transparent)
    resized = image.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR)
    return numpy.asarray(resized, dtype=numpy.uint8)


@dataclass(frozen=True, kw_only=True)
class PixelStore:
    """The pixels of all images, [images, size, size, 3] uint8, and row -> reason of broken images, whose pixels are 0.

    ``file`` is the file of the pixels; None if they are in memory.
    """

    pixels: Any
    broken: Mapping[int, str]
    file: Path | None = None

    @property
    def description(self) -> str:
        """Size and location of the pixels, for a person to read."""
        place = "in memory" if self.file is None else f"in {self.file}"
        return f"{format_bytes(self.pixels.nbytes)} decoded {place}"


def decode_to_memory(paths: Sequence[Path], *, size: int, workers: int, progress: Progress | None = None) -> PixelStore:
    """Decodes the images into the memory of this process; raises DataError if they do not fit."""
    needed, free = len(paths) * size * size * 3, _free_memory()
    if free is not None and needed > _MEMORY_FRACTION * free:
        raise DataError(
            f"{len(paths):,} images of {size}x{size} take {format_bytes(needed)} decoded, expected at most"
            f" {_MEMORY_FRACTION:.0%} of the {format_bytes(free)} of free memory;"
            ' set cache="disk" (--cache disk) or a smaller size'
        )
    pixels = require("numpy", "images").zeros((len(paths), size, size, 3), dtype="uint8")
    return PixelStore(pixels=pixels, broken=_decode_into(pixels, paths, workers, progress))


def _free_memory() -> int | None:
    """The bytes that are available without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _decode_into(pixels: Any, paths: Sequence[Path], workers: int, progress: Progress | None) -> dict[int, str]:
    """Decodes the files into the rows of ``pixels``; returns row -> reason of broken images."""
    broken: dict[int, str] = {}
    decode = partial(decode_file, size=pixels.shape[1])
    with closing(map_in_workers(decode, paths, workers=workers)) as results:
        for row, result in enumerate(results):
            if isinstance(result, str):
                broken[row] = result
            else:
                pixels[row] = result
            if progress is not None:
                progress(row + 1, len(paths))
    return broken


def map_in_workers(
    function: Callable[[Path], Result], paths: Sequence[Path], *, workers: int
) -> Generator[Result, None, None]:
    """Yields ``function(path)`` of each path, in order, from worker processes. Close the generator, or exhaust it.

    Raises:
        DataError: a worker died.
    """
    loader = DataLoader(
        _Mapped(function, paths),
        batch_size=_CHUNK,
        num_workers=min(workers, math.ceil(len(paths) / _CHUNK)),
        collate_fn=list,
        generator=torch.Generator(),  # otherwise the loader draws from the caller's random numbers
    )
    try:
        for results in loader:
            yield from results
    except RuntimeError as error:
        raise DataError(f"a process that decodes images died ({error}); try fewer workers, or --workers 0") from error


class _Mapped(Dataset[Result]):
    def __init__(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> None:
        self._function = function
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Result:
        return self._function(self._paths[index])


def format_bytes(number: int) -> str:
    """Formats a number of bytes: ``5.5 MB``, ``3.8 GB``."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def decode_to_disk(
    paths: Sequence[Path], *, root: Path, size: int, workers: int, cache_dir: Path, progress: Progress | None = None
) -> PixelStore:
    """Maps the images from a file of ``cache_dir``; decodes them into it if an earlier run has not done so.

    Each ``root``, the folder that holds the images, has one file for each size.

    Raises:
        DataError: the file cannot be written, or the disk is too small.
    """
    shape = (len(paths), size, size, 3)
    name = hashlib.sha256(f"{root.resolve()}\0{size}".encode()).hexdigest()[:16]
    file, key = cache_dir / f"images-{name}.pixels", cache_key(paths, root=root, size=size)
    if (cached := _read(file, key, shape)) is not None:
        return cached
    try:
        _write(file, key, shape, lambda pixels: _decode_into(pixels, paths, workers, progress))
    except OSError as error:
        raise DataError(
            f"the decoded images cannot be cached in {str(cache_dir)!r} ({error.strerror or error}), expected a"
            ' writable folder; set cache_dir to another one, or cache="memory"'
        ) from error
    written = _read(file, key, shape)
    if written is None:
        raise DataError(f"{str(file)!r} was replaced by another run meanwhile; run again, one at a time")
    return written


def cache_key(paths: Sequence[Path], *, root: Path, size: int) -> str:
    """Returns a hash of everything that decides the pixels; a replaced or edited image has other times of change."""
    versions = [require(name, "images").__version__ for name in ("PIL", "numpy")]
    digest = hashlib.sha256(json.dumps([_FILE_FORMAT, versions, size]).encode())
    for path in paths:
        stat = path.stat()
        digest.update(f"\0{path.relative_to(root)}\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode())
    return digest.hexdigest()


def _write(file: Path, key: str, shape: tuple[int, ...], fill: Callable[[Any], dict[int, str]]) -> None:
    length = math.prod(shape)
    with atomic_file(file) as partial:
        free = shutil.disk_usage(file.parent).free
        if length > free:
            raise DataError(
                f"the decoded images take {format_bytes(length)}, and {str(file.parent)!r} has {format_bytes(free)}"
                " free; set another cache_dir or a smaller size"
            )
        with partial.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, length)  # writing to a mapped file on a full disk kills the process
        pixels = require("numpy", "images").memmap(partial, dtype="uint8", mode="r+", shape=shape)
        broken = fill(pixels)
        pixels.flush()
        footer = json.dumps({"key": key, "shape": shape, "broken": broken}).encode()
        with partial.open("ab") as opened:
            opened.write(footer + len(footer).to_bytes(_LENGTH_BYTES, "little"))


def _read(file: Path, key: str, shape: tuple[int, ...]) -> PixelStore | None:
    """The content of the file; None if it is missing, damaged, or of other images."""
    try:
        with file.open("rb") as opened:
            opened.seek(-_LENGTH_BYTES, os.SEEK_END)
            length = int.from_bytes(opened.read(), "little")
            opened.seek(-_LENGTH_BYTES - length, os.SEEK_END)
            footer = json.loads(opened.read(length))
    except (OSError, ValueError):
        return None
    if not isinstance(footer, dict) or footer.get("key") != key or footer.get("shape") != list(shape):
        return None
    pixels = require("numpy", "images").memmap(file, dtype="uint8", mode="r", shape=shape)
    return PixelStore(pixels=pixels, broken={int(row): reason for row, reason in footer["broken"].items()}, file=file)
