"""One picture: from a file or a Pillow image to the bytes that the model sees. Runs in the decoding processes too."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
