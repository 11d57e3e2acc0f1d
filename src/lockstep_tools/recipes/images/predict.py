"""Classes of new images: a model folder of this recipe, or another classifier of transformers, on all devices.

files -> decoded -> batches -> probabilities -> a table (CSV) and a contact sheet (PNG)
"""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import read_weights
from lockstep.errors import ConfigError, DataError
from lockstep.extras import require
from lockstep.strategies.base import Strategy
from lockstep.train.model import Model
from lockstep_tools.recipes.from_hub import load_named, may_be_on_hub
from lockstep_tools.recipes.images.batches import to_float
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import ImageFile, decode, images_in, open_upright
from lockstep_tools.recipes.images.model import new_mobilenet
from lockstep_tools.recipes.images.pretrained import load_classifier, preparation_of

_TILE, _CAPTION, _COLUMNS = 160, 36, 6  # pixels, pixels, tiles in a row
_MOST_TILES = 120
_FONT_SIZE = 13
# Pillow's own font has Latin letters alone. Pillow looks for these in the system's font folders, by file name.
_FONT_FILES = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf",
    "SourceHanSansCN-Regular.otf",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "DroidSansFallbackFull.ttf",
    "DejaVuSans.ttf",
)


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A trained classifier: its module, from images 0 to 1 to logits; its classes; the side of its images in pixels."""

    module: nn.Module
    classes: tuple[str, ...]
    size: int


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Probabilities [files, classes] float32 on the CPU of the readable files; path -> reason of the broken ones."""

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    probabilities: Tensor
    broken: dict[Path, str]


def load_trained(name: str) -> Classifier:
    """Loads a run's folder, its ``model`` folder, or a classifier by Hugging Face name.

    Raises:
        ConfigError: it was not found, cannot be read, or is no image classifier.
    """
    path = Path(name).expanduser()
    folder = next((place for place in (path / "model", path) if (place / "config.json").is_file()), None)
    if folder is None:
        _check_is_name(name, path)
        return _load_named_classifier(name)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = settings.get("architectures") or []
    # transformers would load the body without the hidden layer, and draw new classes at random.
    if architectures == ["MobileNetV2Model"]:
        return _load_with_hidden_layer(folder, settings)
    if architectures and not any("ForImageClassification" in kind for kind in architectures):
        raise ConfigError(
            f"{str(folder)!r} has a {', '.join(architectures)}, expected an image classifier; give the folder of"
            " a run of lockstep train images"
        )
    return _load_classifier(str(folder))


def _check_is_name(name: str, path: Path) -> None:
    """Raises a ConfigError if ``name`` can only be a path; the hub would be asked for it many times, and in vain."""
    expected = "expected the folder of a finished run of lockstep train images, or its model folder"
    if path.is_dir():
        raise ConfigError(
            f"{name!r} has no model: it has neither model/config.json nor config.json; {expected}. An interrupted run"
            " goes on with --resume"
        )
    if path.exists():
        raise ConfigError(f"{name!r} is a file; {expected}")
    if not may_be_on_hub(name):
        raise ConfigError(f"the folder {name!r} does not exist; {expected}")


def _load_named_classifier(name: str) -> Classifier:
    try:
        return _load_classifier(name)
    except ConfigError as error:
        raise ConfigError(f"there is no folder {name!r}, and no such model from Hugging Face: {error}") from error


def _load_classifier(name: str) -> Classifier:
    classes = _classes_of(name)
    preparation = preparation_of(name)
    module = load_classifier(name, classes, batch_norm_momentum=0.1)
    return Classifier(module=module, classes=classes, size=preparation.size)


def _classes_of(name: str) -> tuple[str, ...]:
    return tuple(load_named(name, require("transformers", "images").AutoConfig).id2label.values())


def _load_with_hidden_layer(folder: Path, settings: dict[str, Any]) -> Classifier:
    """Loads a model with a hidden layer before the classes, which transformers has not."""
    weights = read_weights(folder / "model.safetensors")
    classes = tuple(settings["id2label"].values())
    config = ImagesConfig(
        size=settings["image_size"],
        hidden=len(weights["classifier.0.weight"]),
        width_multiplier=settings["depth_multiplier"],
        output_stride=settings["output_stride"],
    )
    module = new_mobilenet(config, classes)
    module.load_state_dict(weights)
    return Classifier(module=module, classes=classes, size=config.side)


def find_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Returns the files, and the images in the folders and below, sorted by path within each folder.

    Raises:
        DataError: a path does not exist, or there is no image.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{str(path)!r} does not exist; expected an image, or a folder of images")
        files += images_in(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"no image is in {', '.join(repr(str(path)) for path in paths)}; expected at least one")
    return tuple(dict.fromkeys(files))


def predict_files(
    classifier: Classifier, files: Sequence[Path], strategy: Strategy, *, batch_size: int = 64
) -> Predictions:
    """Classifies the files, ``batch_size`` at a time; those that cannot be read are left out and listed.

    Raises:
        DataError: no file can be read.
    """
    broken: dict[Path, str] = {}

    def batches() -> Iterator[Tensor]:
        for start in range(0, len(files), batch_size):
            if images := _decode(files[start : start + batch_size], classifier.size, broken):
                yield to_float(torch.stack(images))
        if len(broken) == len(files):
            path, reason = next(iter(broken.items()))
            raise DataError(
                f"none of the {len(files):,} files can be read as an image, such as {str(path)!r} ({reason})"
            )

    with strategy.scope():
        model = Model(classifier.module)
    # The batches decode as they are asked for, so only some of them are in memory beside the logits.
    logits: Tensor = model.predict(batches())
    return Predictions(
        classes=classifier.classes,
        files=tuple(path for path in files if path not in broken),
        probabilities=logits.float().softmax(dim=1),
        broken=broken,
    )


def _decode(files: Sequence[Path], size: int, broken: dict[Path, str]) -> list[Tensor]:
    """Returns the readable images, [size, size, 3] uint8 each, and adds path -> reason of the others to ``broken``."""
    images: list[Tensor] = []
    for path in files:
        result = decode(ImageFile(name=path.name, label=0, path=path), size)
        if isinstance(result, str):
            broken[path] = result
        else:
            images.append(torch.frombuffer(result, dtype=torch.uint8).view(size, size, 3))
    return images


def render_table(predictions: Predictions) -> str:
    """Returns a CSV: file, class, its probability, error, and the probability of each class. Broken files are last."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "class", "probability", "error", *predictions.classes])
    for path, row in zip(predictions.files, predictions.probabilities.tolist(), strict=True):
        likeliest = max(range(len(row)), key=row.__getitem__)
        shares = [f"{share:.6f}" for share in row]
        writer.writerow([path, predictions.classes[likeliest], shares[likeliest], "", *shares])
    for path, reason in predictions.broken.items():
        writer.writerow([path, "", "", reason, *[""] * len(predictions.classes)])
    return text.getvalue()


def draw_contact_sheet(predictions: Predictions) -> Any:
    """Returns a Pillow image of at most 120 pictures, each with its class and probability, the least certain first.

    Warns if no font has the letters of a class; the number of the class, counted from 0, then stands for its name.
    """
    pillow = require("PIL.Image", "images")
    certainty, classes = predictions.probabilities.max(dim=1)
    order = certainty.argsort(stable=True)[:_MOST_TILES].tolist()
    rows = math.ceil(len(order) / _COLUMNS)
    sheet = pillow.new("RGB", (_COLUMNS * _TILE, rows * (_TILE + _CAPTION)), "white")
    draw = require("PIL.ImageDraw", "images").Draw(sheet)
    font = _font_for("".join((*predictions.classes, *(predictions.files[index].name for index in order))))
    names = _drawable_names(predictions.classes, font)
    for place, index in enumerate(order):
        x, y = place % _COLUMNS * _TILE, place // _COLUMNS * (_TILE + _CAPTION)
        picture = _thumbnail(predictions.files[index])
        sheet.paste(picture, (x + (_TILE - picture.width) // 2, y + (_TILE - picture.height) // 2))
        name = names[int(classes[index])]
        caption = f"{_shorten(name, font)} {certainty[index]:.2f}\n{_shorten(predictions.files[index].name, font)}"
        draw.multiline_text((x + 4, y + _TILE), caption, fill="black", font=font, spacing=2)
    return sheet


def _font_for(text: str) -> Any:
    """Pillow's own font, or the font of the system that has more of the letters in ``text``."""
    fonts = require("PIL.ImageFont", "images")
    candidates = [fonts.load_default(size=_FONT_SIZE)]
    if _missing(text, candidates[0]):
        for file in _FONT_FILES:
            with suppress(OSError):  # it is not installed
                candidates.append(fonts.truetype(file, _FONT_SIZE))
    return min(candidates, key=lambda font: len(_missing(text, font)))


def _missing(text: str, font: Any) -> set[str]:
    """The letters that a font draws as it draws U+FFFF, which is no letter."""
    # Pillow does not say which letters a font has; it draws one box for all that are missing.
    box = bytes(font.getmask("\uffff"))
    return {letter for letter in set(text) if not letter.isspace() and bytes(font.getmask(letter)) == box}


def _drawable_names(classes: Sequence[str], font: Any) -> tuple[str, ...]:
    names = tuple(f"class {index}" if _missing(name, font) else name for index, name in enumerate(classes))
    if names != tuple(classes):
        name = next(name for name in classes if name not in names)
        warnings.warn(
            f"no font of this machine has all letters of {name!r}; the contact sheet says class {classes.index(name)},"
            " counted from 0 as the table's columns are; for Chinese, Japanese and Korean install fonts-noto-cjk",
            stacklevel=3,
        )
    return names


def _thumbnail(path: Path) -> Any:
    image = open_upright(path)
    image.thumbnail((_TILE - 8, _TILE - 8))
    scale = (_TILE - 8) / max(image.size)
    if scale > 1:  # a picture of 8x8 pixels is drawn in large ones
        nearest = require("PIL.Image", "images").Resampling.NEAREST
        image = image.resize((round(image.width * scale), round(image.height * scale)), nearest)
    return image


def _shorten(text: str, font: Any) -> str:
    """Cuts a text in the middle until it fits under a picture."""
    whole = text
    for length in range(len(whole), 3, -1):
        half = length // 2
        text = whole if length == len(whole) else f"{whole[:half]}…{whole[-half:]}"
        if font.getlength(text) < _TILE - 44:
            break
    return text
