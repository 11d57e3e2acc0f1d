from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep_tools.recipes.images import dataset
from lockstep_tools.recipes.images.dataset import ImageFile


def decode_file(path: Path, size: int) -> np.ndarray | str:
    found = dataset.decode(ImageFile(name=path.name, label=0, path=path), size)
    return found if isinstance(found, str) else np.frombuffer(found, dtype=np.uint8).reshape(size, size, 3)


def to_square(image: Image.Image, size: int) -> np.ndarray:
    return np.frombuffer(dataset.to_square(image, size), dtype=np.uint8).reshape(size, size, 3)


def gradient(width: int = 16, height: int = 8) -> Image.Image:
    """Dark at the left, light at the right, redder downwards."""
    across = np.linspace(0, 255, width).astype(np.uint8)[None].repeat(height, axis=0)
    down = np.linspace(0, 255, height).astype(np.uint8)[:, None].repeat(width, axis=1)
    return Image.fromarray(np.stack([down, across, across], axis=2))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif"])
def test_every_format_gives_the_picture(suffix: str, tmp_path: Path):
    path = tmp_path / f"picture{suffix}"
    gradient().save(path)
    pixels = decode_file(path, 8)
    assert (pixels.shape, pixels.dtype) == ((8, 8, 3), np.uint8)
    assert abs(pixels.astype(int) - to_square(gradient(), 8)).mean() < 16


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "RGBA", "LA"])
def test_every_mode_becomes_rgb(mode: str):
    white = Image.new("RGB", (4, 4), "white").convert(mode)
    assert to_square(white, 4).tolist() == [[[255] * 3] * 4] * 4


def test_sixteen_bits_of_grey_are_brought_to_eight(tmp_path: Path):
    Image.fromarray(np.array([[0, 257 * 100], [65535, 257 * 7]], dtype=np.uint16)).save(tmp_path / "deep.png")
    assert decode_file(tmp_path / "deep.png", 2)[:, :, 0].tolist() == [[0, 100], [255, 7]]


def test_a_picture_is_turned_as_the_camera_noted(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the right side of what is stored is the bottom
    gradient(16, 16).save(tmp_path / "turned.png", exif=exif)
    turned = decode_file(tmp_path / "turned.png", 16)
    assert turned[0, :, 1].max() < 20
    assert turned[-1, :, 1].min() > 235


def test_large_jpegs_are_reduced_from_what_they_show(tmp_path: Path):
    gradient(640, 480).save(tmp_path / "large.jpg", quality=95)
    assert abs(decode_file(tmp_path / "large.jpg", 16).astype(int) - to_square(gradient(640, 480), 16)).max() < 8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "cannot identify image file"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, ""),
        # Pillow would give it to Ghostscript to run.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n", "cannot identify image file"),
    ],
)
def test_what_is_no_picture_has_a_reason(content: bytes, reason: str, tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(content)
    said = decode_file(tmp_path / "broken.png", 8)
    assert isinstance(said, str)
    assert reason in said


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif"])
def test_a_picture_that_is_cut_off_has_a_reason(suffix: str, tmp_path: Path):
    path = tmp_path / f"cut{suffix}"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert isinstance(decode_file(path, 8), str)


def test_a_file_that_is_gone_has_a_reason(tmp_path: Path):
    assert "No such file or directory" in decode_file(tmp_path / "gone.png", 8)
