"""What pictures there are, without training on them: how many of each class and part, how large, which broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.decode import inspect_file
from lockstep.recipes.images.digits import DIGIT_CLASSES, read_digits
from lockstep.recipes.images.parts import PictureParts
from lockstep.recipes.images.pixels import Progress, in_workers
from lockstep.recipes.images.scan import scan_tree
from lockstep.recipes.images.source import BrokenPicture, divide_pictures

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
    return _digits(config) if config.data is None else _tree(config, config.data.expanduser(), progress)


def _digits(config: ImagesConfig) -> PictureSummary:
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


def _tree(config: ImagesConfig, folder: Path, progress: Progress | None) -> PictureSummary:
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
