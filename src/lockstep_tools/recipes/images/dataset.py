"""Labelled images, found and decoded once per run: a tree of class folders, or scikit-learn's handwritten digits.

    DIR/CLASS/*.jpg                                 one tree, from which validation and test images are held out
    DIR/train/CLASS/*.jpg, DIR/test/CLASS/*.jpg     split already; DIR/valid may be there too

``split_folders`` reads the names of the parts. Other files (LICENSE.txt, Thumbs.db) and hidden files are ignored.
Worker processes of torch's DataLoader decode; epochs read the array, so no image is decoded twice.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.atomic_files import atomic_write
from lockstep.collectives.communicator import Communicator, all_gather_object, run_on_chief
from lockstep.errors import DataError
from lockstep.extras import find_package, require
from lockstep.replicas.cpu.memory import available_mb
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.split_folders import Split, folders_in, is_hidden, split_folders

FORMATS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif"})
"""Suffixes of image files, in lower case; of an animation the first frame is used."""
# Pillow goes by the content of a file, whatever its name, and would start Ghostscript for PostScript.
_DECODERS = ("PNG", "JPEG", "BMP", "WEBP", "GIF")
MAX_BROKEN = 0.05
"""Fraction of the images that may be broken and are skipped; more is an error."""
_CHUNK = 16  # images that a worker sends together
_MEMORY_FRACTION = 0.8  # of the free memory; the model and its batches need some too


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An image and the index of its class among the sorted classes.

    ``name`` is its path below the split's folder, such as "Cat/12.jpg": the same wherever the tree is. ``embedded`` is
    the Pillow image if it is not a file.
    """

    name: str
    label: int
    path: Path = Path()
    embedded: Any = None


Splits = Mapping[Split, tuple[ImageFile, ...]]


@dataclass(frozen=True, kw_only=True)
class LabelledPixels:
    """The readable images of a split: pixels [images, size, size, 3] uint8, and their labels."""

    pixels: Tensor
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Decoded images: the three splits ("valid" may be empty), and path -> reason of the broken ones.

    An image that one worker cannot read is broken for all of them.
    ``only_trained`` are the classes without an image in the test, as one image cannot be held out; ``loose`` images are
    beside the class folders, and are left out.
    """

    splits: Mapping[Split, LabelledPixels]
    classes: tuple[str, ...]
    broken: Mapping[Path, str]
    source: str
    only_trained: tuple[str, ...] = ()
    loose: int = 0


def load_images(
    config: ImagesConfig,
    *,
    workers: Communicator | None = None,
    skipped_file: Path | None = None,
    show_progress: bool = False,
) -> ImageDataset:
    """Finds, splits and decodes the images of the config, or the embedded digits. Every worker must call it.

    Each worker reads the images itself, so that each host may have a copy of them. The chief writes all images that
    cannot be read to ``skipped_file``, also if they are too many to train, see ``write_skipped``.

    Raises:
        DataError: the images cannot be used, or are not the same on all workers.
    """
    if config.data is None:
        source, (classes, images_by_split) = "scikit-learn's digits", read_digits()
    else:
        source, (classes, images_by_split) = str(config.data), scan_folder(config.data.expanduser())
    for split, fraction in (("valid", config.valid_fraction), ("test", config.test_fraction)):
        if split in images_by_split and fraction != getattr(ImagesConfig, f"{split}_fraction"):
            warnings.warn(f"{split}_fraction={fraction:g} has no effect: the images have a {split} split", stacklevel=3)
    splits = complete_splits(images_by_split, valid_fraction=config.valid_fraction, test_fraction=config.test_fraction)
    images = [(split, image) for split, files in splits.items() for image in files]
    pixels, broken = _decode([image for _, image in images], config, show_progress=show_progress)
    if workers is not None:
        broken = _agree_on_broken(images, broken, workers)
    reasons = {images[index][1].path: reason for index, reason in broken.items()}
    _report_broken(reasons, len(images), workers, skipped_file)
    decoded = _divide(splits, pixels, broken)
    for label, name in enumerate(classes):
        if label not in decoded["train"].labels:
            raise DataError(f"no readable training image is left of the class {name!r}, expected at least one")
    if not decoded["test"].labels:
        raise DataError("no image is left for the test; add images: a class needs two to hold out one")
    return ImageDataset(
        splits=decoded,
        classes=classes,
        broken=reasons,
        source=source,
        only_trained=tuple(name for label, name in enumerate(classes) if label not in decoded["test"].labels),
        loose=0 if config.data is None else num_loose(config.data.expanduser()),
    )


def _agree_on_broken(
    images: Sequence[tuple[Split, ImageFile]], broken: Mapping[int, str], workers: Communicator
) -> dict[int, str]:
    """Returns index -> reason of the images that any worker cannot read. Every worker must call it.

    The copy of one host may be damaged: without this its worker would train on other batches than the others do.
    """
    # A NUL cannot be in a file's name, so no two lists of names have one text.
    digest = _name_digest("\0".join(f"{split}/{image.name}" for split, image in images)).hex()
    summary = {"images": len(images), "names": digest, "broken": dict(broken)}
    received = all_gather_object(workers, "the images", summary)
    for worker, report in zip(workers.names, received, strict=True):
        if report["names"] != received[0]["names"]:
            raise DataError(
                f"{worker} has other images than {workers.names[0]} ({report['images']:,} and"
                f" {received[0]['images']:,}); expected the same files below --data on every host: copy them again"
            )
    reasons: dict[int, str] = {}
    for worker, report in zip(workers.names, received, strict=True):
        for index, reason in report["broken"].items():
            reasons.setdefault(index, reason if index in broken else f"{reason}; on {worker}")
    return dict(sorted(reasons.items()))


def write_skipped(file: Path, broken: Mapping[Path, str]) -> None:
    """Writes a line for each broken image: path, a tab, reason. Without any, only an earlier list is replaced."""
    if broken or file.exists():
        atomic_write(file, "".join(f"{path}\t{reason}\n" for path, reason in broken.items()))


def _report_broken(broken: Mapping[Path, str], images: int, workers: Communicator | None, file: Path | None) -> None:
    """Writes the list of broken images to ``file``, and warns of them. Every worker must call it.

    Raises a DataError if they are more than ``MAX_BROKEN`` of all.
    """
    if file is not None:
        write = partial(write_skipped, file, broken)
        write() if workers is None else run_on_chief(workers, "write the list of broken images", write)
    if not broken:
        return
    path, reason = next(iter(broken.items()))
    share = len(broken) / images
    message = f"{len(broken):,} of {images:,} images cannot be read, such as {str(path)!r} ({reason})"
    if share > MAX_BROKEN:
        listing = "them" if file is None else f"those that {str(file)!r} lists with their reasons"
        raise DataError(
            f"{message}; these are {100 * share:.3g}%, expected at most {MAX_BROKEN:.0%}; repair or remove {listing}"
        )
    if workers is None or workers.leads:
        warnings.warn(f"{message}; they are skipped", stacklevel=3)


def check_data(folder: Path) -> None:
    """Raises DataError if there is no such folder."""
    if not folder.is_dir():
        raise DataError(
            f"the image folder {str(folder)!r} does not exist or is not a folder; expected one folder of images for"
            " each class; correct --data, or leave it out for the embedded digits"
        )


def scan_folder(folder: Path) -> tuple[tuple[str, ...], Splits]:
    """Returns the sorted classes, and the images of each split; only "train" if the tree is not split.

    Raises:
        DataError: the folder is missing, has fewer than two class folders or an empty one, or a split has a class that
            the training split does not have.
    """
    check_data(folder)
    parts = {split: (path, _images_by_class(path)) for split, path in split_folders(folder).items()}
    classes = tuple(sorted(parts["train"][1]))
    for path, by_class in parts.values():
        if len(classes) < 2 or not by_class.keys() <= set(classes) or not all(by_class.values()):
            counts = ", ".join(f"{name}: {len(images)}" for name, images in list(by_class.items())[:10]) or "none"
            inside = [str(path / name) for name in by_class if folders_in(path / name)]
            deeper = f"; if they are deeper, give --data {inside[0]}" if len(by_class) == 1 and inside else ""
            raise DataError(
                f"the image folder {str(path)!r} has these classes and images: {counts}; expected at least two folders,"
                f" the same ones in every split, each with an image ({', '.join(sorted(FORMATS))}){deeper}"
            )
    splits = {
        split: tuple(
            ImageFile(name=path.relative_to(root).as_posix(), label=label, path=path)
            for label, name in enumerate(classes)
            for path in by_class.get(name, ())
        )
        for split, (root, by_class) in parts.items()
    }
    return classes, splits


def num_loose(folder: Path) -> int:
    """The number of images beside class folders or splits, whose class is not known."""
    folders = {folder, *split_folders(folder).values()}
    return sum(_is_image(path) for place in folders for path in place.iterdir() if not is_hidden(path.name))


def images_in(folder: Path) -> list[Path]:
    """The images of a folder and those below it, without hidden ones, sorted by path."""
    return sorted(
        path
        for path in folder.rglob("*")
        if _is_image(path) and not any(map(is_hidden, path.relative_to(folder).parts))
    )


def _images_by_class(split: Path) -> dict[str, list[Path]]:
    return {folder.name: images_in(folder) for folder in folders_in(split)}


def _is_image(path: Path) -> bool:
    # A link to a file that is not there counts: it is reported as unreadable, where leaving it out would be silent.
    return path.suffix.lower() in FORMATS and (path.is_file() or not path.exists())


def complete_splits(splits: Splits, *, valid_fraction: float, test_fraction: float) -> Splits:
    """Returns all three splits: those that exist as they are, the missing ones held out of the training split.

    Within each class the images whose names have the lowest SHA-256 are held out. Nothing is drawn at random: the same
    names give the same splits everywhere and with every seed, and a new image hardly changes the others' splits.
    """
    train, test, valid = splits["train"], splits.get("test"), splits.get("valid")
    if test is None:
        train, test = hold_out(train, test_fraction)
    if valid is None:
        train, valid = hold_out(train, valid_fraction)
    return {"train": train, "valid": valid, "test": test}


def hold_out(images: Sequence[ImageFile], fraction: float) -> tuple[tuple[ImageFile, ...], tuple[ImageFile, ...]]:
    """Returns the images that are kept and those that are held out, each in the given order.

    Each class keeps at least one image, and holds out at least one if it has two and the fraction is not 0.
    """
    by_class: dict[int, list[str]] = defaultdict(list)
    for image in images:
        by_class[image.label].append(image.name)
    removed: set[str] = set()
    for names in by_class.values():
        number = min(len(names) - 1, max(1, round(fraction * len(names)))) if fraction else 0
        removed.update(sorted(names, key=_name_digest)[:number])
    return (
        tuple(image for image in images if image.name not in removed),
        tuple(image for image in images if image.name in removed),
    )


def _name_digest(name: str) -> bytes:
    # A name from an archive of an older Windows may be bytes that are not UTF-8.
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _decode(images: Sequence[ImageFile], config: ImagesConfig, *, show_progress: bool) -> tuple[Tensor, dict[int, str]]:
    """Returns pixels [images, size, size, 3] uint8, arbitrary for the broken ones, and index -> reason of these."""
    needed_mb, free_mb = len(images) * config.side**2 * 3 / 2**20, available_mb()
    if needed_mb > _MEMORY_FRACTION * free_mb:
        raise DataError(
            f"{len(images):,} images of {config.side}x{config.side} take {needed_mb:,.0f} MB decoded, expected at most"
            f" {_MEMORY_FRACTION:.0%} of the {free_mb:,.0f} MB of free memory; set a smaller size"
        )
    loader = DataLoader(
        _Decoded(images, config.side),
        batch_size=_CHUNK,
        num_workers=0 if config.data is None else min(config.num_workers, math.ceil(len(images) / _CHUNK)),
        # A broken image has a reason in place of pixels, which the default collation cannot stack.
        collate_fn=list,
        generator=torch.Generator(),  # otherwise the loader draws from the caller's random numbers
    )
    tqdm = require("tqdm", "images").tqdm
    chunks = tqdm(loader, desc="decoding", unit_scale=_CHUNK, leave=False, disable=None if show_progress else True)
    # Filled in place: a list of images and its stack would take the memory twice.
    pixels = torch.empty(len(images), config.side, config.side, 3, dtype=torch.uint8)
    broken: dict[int, str] = {}
    for index, result in enumerate(result for chunk in chunks for result in chunk):
        if isinstance(result, str):
            broken[index] = result
        else:
            pixels[index] = torch.frombuffer(result, dtype=torch.uint8).view(pixels.shape[1:])
    return pixels, broken


def _divide(splits: Splits, pixels: Tensor, broken: Mapping[int, str]) -> dict[Split, LabelledPixels]:
    """Divides the pixels of all images, in the order of the splits, without the broken ones.

    The pixels move to the front in place: a second copy may not fit into memory.
    """
    labels: dict[Split, tuple[int, ...]] = {}
    index = readable = 0
    for split, files in splits.items():
        rows = range(index, index + len(files))
        labels[split] = tuple(image.label for row, image in zip(rows, files, strict=True) if row not in broken)
        for row in rows:
            if row not in broken:
                if readable < row:
                    pixels[readable] = pixels[row]
                readable += 1
        index += len(files)
    parts = torch.split(pixels[:readable], [len(split_labels) for split_labels in labels.values()])
    return {split: LabelledPixels(pixels=part, labels=labels[split]) for split, part in zip(labels, parts, strict=True)}


class _Decoded(Dataset[bytearray | str]):
    def __init__(self, images: Sequence[ImageFile], size: int) -> None:
        self._images, self._size = images, size

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> bytearray | str:
        return decode(self._images[index], self._size)


def decode(image: ImageFile, size: int) -> bytearray | str:
    """Returns the pixels [size, size, 3] of an image, or the reason why it cannot be decoded."""
    if image.embedded is not None:
        return to_square(image.embedded, size)
    try:
        with _opened(image.path) as opened:
            # A JPEG is then decoded at 1/2, 1/4 or 1/8 of its size, at least twice the needed size.
            opened.draft("RGB", (2 * size, 2 * size))
            return to_square(opened, size)
    except Exception as error:  # noqa: BLE001 - Pillow's plugins raise almost anything for damaged files
        # Pillow says "cannot identify image file" of an empty one, which names no cause.
        if image.path.is_file() and image.path.stat().st_size == 0:
            return "the file is empty"
        return " ".join(str(error).split())[:120] or type(error).__name__


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file as a Pillow image, which decodes when its pixels are asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged metadata, which does not affect the pixels
        with require("PIL.Image", "images").open(path, formats=_DECODERS) as image:
            yield image


def open_upright(path: Path) -> Any:
    """Returns a readable file as a Pillow image, upright and in RGB."""
    with _opened(path) as image:
        return _to_upright_rgb(image)


def to_square(image: Any, size: int) -> bytearray:
    """Returns a Pillow image as bytes: upright, RGB, resized to [size, size, 3] without keeping proportions.

    Resizing is bilinear and antialiased; 16 bits per channel are reduced to 8.
    """
    bilinear = require("PIL.Image", "images").Resampling.BILINEAR
    return bytearray(_to_upright_rgb(image).resize((size, size), bilinear).tobytes())


def _to_upright_rgb(image: Any) -> Any:
    with suppress(Exception):  # of damaged EXIF data, where the orientation is not known
        image = require("PIL.ImageOps", "images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow's own conversion would clip at 255
        image = image.convert("I").point(lambda grey: grey * (1 / 257)).convert("L")
    return image.convert("RGB")


_WHITE = 16  # grey values of the digits go from 0 to 16
_DIGITS_TEST_FRACTION = 0.2


def read_digits() -> tuple[tuple[str, ...], Splits]:
    """Returns the classes and splits of scikit-learn's digits: 1,797 real ones of 8x8 pixels, part of the package.

    The last fifth of each digit is the test split. The images are in the order of their writers, so most test images
    are by other writers than the training images, which is harder than a random fifth.
    """
    # Its load_digits reads the same file, but importing scikit-learn takes longer than importing torch.
    file = find_package("sklearn", "images") / "datasets" / "data" / "digits.csv.gz"
    table = require("numpy", "images").loadtxt(file, delimiter=",")
    digits, pixels = table[:, -1], table[:, :-1].reshape(-1, 8, 8)
    pillow = require("PIL.Image", "images")
    greys = (pixels * (255 / _WHITE)).round().astype("uint8")
    splits: dict[Split, list[ImageFile]] = {"train": [], "test": []}
    for digit in range(10):
        indices = [int(index) for index in (digits == digit).nonzero()[0]]
        first_of_test = len(indices) - round(_DIGITS_TEST_FRACTION * len(indices))
        for number, index in enumerate(indices):
            split: Split = "train" if number < first_of_test else "test"
            name, image = f"{digit}/{index:04}.png", pillow.fromarray(greys[index])
            splits[split].append(ImageFile(name=name, label=digit, path=Path(split, name), embedded=image))
    return tuple("0123456789"), {split: tuple(images) for split, images in splits.items()}


def write_digits(folder: Path) -> dict[Split, int]:
    """Writes the digits as a tree of PNG files of 8x8 pixels; returns the number of images in each split.

    The tree is written beside ``folder``, which must be new or empty, and then renamed: it is complete or absent. A run
    with ``data=folder`` gets the same pixels as a run without data.
    """
    # Beside the folder and not in the system's temporary one: ``rename`` works within one file system only.
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    _, splits = read_digits()
    try:
        for image in (image for images in splits.values() for image in images):
            (unfinished / image.path).parent.mkdir(parents=True, exist_ok=True)
            image.embedded.save(unfinished / image.path)
        unfinished.rename(folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"the digits cannot be written to {str(folder)!r} ({reason}); give a new or an empty folder"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {split: len(images) for split, images in splits.items()}
