"""What pictures there are, without training on them: how many of each class and part, how large, which broken."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import DataError
from lockstep.extras import require
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.folder import (
    DIGIT_CLASSES,
    Part,
    Picture,
    PictureParts,
    PictureTree,
    divide,
    read_digits,
    scan_tree,
)
from lockstep.recipes.images.pixels import (
    PixelStore,
    Progress,
    disk_store,
    in_workers,
    inspect_file,
    memory_store,
    prepare,
)

_NAMED = 3  # broken pictures that a message names


@dataclass(frozen=True, kw_only=True)
class BrokenPicture:
    """A picture that is skipped: its file and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class LabelledPictures:
    """One part of the pictures, without the broken ones: their places in the pixels, and their labels."""

    rows: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PictureSource:
    """Pictures, decoded.

    Args:
        store: the pixels of all.
        parts: the pictures of each part; "valid" may be empty.
        classes: names, in the order of the labels.
        broken: the pictures that are skipped.
        source: where they came from, in words for a person.
    """

    store: PixelStore
    parts: Mapping[Part, LabelledPictures]
    classes: tuple[str, ...]
    broken: tuple[BrokenPicture, ...]
    source: str


def read_pictures(config: ImagesConfig, *, progress: Progress | None = None) -> PictureSource:
    """Reads and decodes the pictures that the config names, or the embedded ones.

    Args:
        config: the run.
        progress: told how many files are decoded, of how many.

    Raises:
        DataError: the pictures cannot be used, or too many of them are broken.
    """
    return _digits(config) if config.data is None else _tree(config, config.data.expanduser(), progress)


def divide_pictures(config: ImagesConfig, parts: Mapping[Part, tuple[Picture, ...]]) -> PictureParts:
    """The three parts of a run. A share that holds out nothing, because the data is divided, warns."""
    for part, share, default in (
        ("valid", config.valid_share, ImagesConfig.valid_share),
        ("test", config.test_share, ImagesConfig.test_share),
    ):
        if part in parts and share != default:
            warnings.warn(f"{part}_share={share:g} has no effect: the pictures have a {part} part", stacklevel=3)
    return divide(parts, valid_share=config.valid_share, test_share=config.test_share)


def _digits(config: ImagesConfig) -> PictureSource:
    digits = read_digits()
    pixels = [prepare(image, config.size) for image in digits.images.values()]
    store = PixelStore(pixels=require("numpy", "images").stack(pixels), broken={})
    parts = divide_pictures(config, digits.parts)
    return PictureSource(
        store=store,
        parts=_labelled(parts, list(digits.images), store),
        classes=DIGIT_CLASSES,
        broken=(),
        source="scikit-learn's digits",
    )


def _tree(config: ImagesConfig, folder: Path, progress: Progress | None) -> PictureSource:
    tree = scan_tree(folder)
    for what in tree.left_out:
        warnings.warn(f"left out: {what}", stacklevel=4)
    parts = divide_pictures(config, tree.parts)
    # In the tree's order, not in that of the parts: other shares then find the same pixels on disk.
    paths = [picture.path for pictures in tree.parts.values() for picture in pictures]
    store = _store(config, tree, paths, progress)
    broken = tuple(BrokenPicture(path=paths[place], reason=reason) for place, reason in store.broken.items())
    _check_broken(broken, len(paths), config.max_broken)
    labelled = _labelled(parts, paths, store)
    _check_whole(labelled, tree.classes)
    return PictureSource(store=store, parts=labelled, classes=tree.classes, broken=broken, source=str(folder))


def _store(config: ImagesConfig, tree: PictureTree, paths: Sequence[Path], progress: Progress | None) -> PixelStore:
    if config.cache == "memory":
        return memory_store(paths, size=config.size, workers=config.decoders, progress=progress)
    return disk_store(
        paths,
        root=tree.root,
        size=config.size,
        workers=config.decoders,
        folder=config.cache_dir.expanduser(),
        progress=progress,
    )


def _labelled(parts: PictureParts, paths: Sequence[Path], store: PixelStore) -> dict[Part, LabelledPictures]:
    places = {path: place for place, path in enumerate(paths) if place not in store.broken}
    whole = {part: [one for one in pictures if one.path in places] for part, pictures in parts.named().items()}
    return {
        part: LabelledPictures(
            rows=tuple(places[picture.path] for picture in pictures),
            labels=tuple(picture.label for picture in pictures),
        )
        for part, pictures in whole.items()
    }


def _check_broken(broken: Sequence[BrokenPicture], pictures: int, most: float) -> None:
    if not broken:
        return
    named = ", ".join(f"{str(one.path)!r} ({one.reason})" for one in broken[:_NAMED])
    more = f" and {len(broken) - _NAMED:,} more" if len(broken) > _NAMED else ""
    said = f"{len(broken):,} of {pictures:,} pictures cannot be read: {named}{more}"
    if len(broken) > most * pictures:
        raise DataError(
            f"{said}; expected at most {most:.3g} of them (max_broken); mend or remove them, or raise max_broken"
        )
    warnings.warn(f"{said}; they are skipped", stacklevel=5)


def _check_whole(parts: Mapping[Part, LabelledPictures], classes: Sequence[str]) -> None:
    """Refuses what only shows when the broken pictures are gone: a class, or a part, of nothing but broken ones."""
    gone = sorted(set(range(len(classes))) - set(parts["train"].labels))
    if gone:
        names = ", ".join(repr(classes[label]) for label in gone)
        raise DataError(f"no picture to train on is left of the class {names}; expected at least one; mend some")
    if not parts["test"].rows:
        raise DataError(
            "no picture is left for the test, expected at least one; add pictures: a class of two or more gives one"
        )


Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class PictureSummary:
    """What the pictures are.

    Args:
        source: where they are, in words for a person.
        classes: names, sorted.
        counts: part -> the pictures of each class, broken ones included.
        rule: how they came into the parts, in words for a person.
        sizes: (width, height) in pixels as stored -> how many pictures have it.
        broken: pictures that cannot be decoded.
        left_out: what lies in the folder and is not taken, in words for a person.
    """

    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    rule: str
    sizes: Mapping[Size, int]
    broken: tuple[BrokenPicture, ...]
    left_out: tuple[str, ...]

    @property
    def pictures(self) -> int:
        """All of them."""
        return sum(map(sum, self.counts.values()))


def summarize_pictures(config: ImagesConfig, *, progress: Progress | None = None) -> PictureSummary:
    """Finds the pictures that the config names, or the embedded ones, and decodes each once.

    Args:
        config: names the folder and the shares held out.
        progress: told how many files are read, of how many.

    Raises:
        DataError: no pictures that a run could use.
    """
    return (
        _digits_of_describe(config)
        if config.data is None
        else _tree_of_describe(config, config.data.expanduser(), progress)
    )


def _digits_of_describe(config: ImagesConfig) -> PictureSummary:
    digits = read_digits()
    parts = divide_pictures(config, digits.parts)
    return PictureSummary(
        source="scikit-learn's digits",
        classes=DIGIT_CLASSES,
        counts=_counts(parts, len(DIGIT_CLASSES)),
        rule=_rule(config, frozenset(digits.parts)),
        sizes=Counter(image.size for image in digits.images.values()),
        broken=(),
        left_out=(),
    )


def _tree_of_describe(config: ImagesConfig, folder: Path, progress: Progress | None) -> PictureSummary:
    tree = scan_tree(folder)
    parts = divide_pictures(config, tree.parts)
    paths = [picture.path for pictures in tree.parts.values() for picture in pictures]
    sizes: Counter[Size] = Counter()
    broken = []
    with closing(in_workers(inspect_file, paths, workers=config.decoders)) as results:
        for number, (path, result) in enumerate(zip(paths, results, strict=True), start=1):
            if isinstance(result, str):
                broken.append(BrokenPicture(path=path, reason=result))
            else:
                sizes[result] += 1
            if progress is not None:
                progress(number, len(paths))
    return PictureSummary(
        source=str(tree.root),
        classes=tree.classes,
        counts=_counts(parts, len(tree.classes)),
        rule=_rule(config, frozenset(tree.parts)),
        sizes=sizes,
        broken=tuple(broken),
        left_out=tree.left_out,
    )


def _counts(parts: PictureParts, classes: int) -> dict[str, tuple[int, ...]]:
    labels = {part: Counter(picture.label for picture in pictures) for part, pictures in parts.named().items()}
    return {part: tuple(of_part[label] for label in range(classes)) for part, of_part in labels.items()}


def _rule(config: ImagesConfig, given: frozenset[str]) -> str:
    held = [(part, share) for part, share in (("test", config.test_share), ("valid", config.valid_share)) if share]
    taken = [f"{part} ({share:.3g})" for part, share in held if part not in given]
    if not taken:
        return "the parts are as the data has them"
    return f"held out of the training part, by the hash of a picture's name within each class: {', '.join(taken)}"
