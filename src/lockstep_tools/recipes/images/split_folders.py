"""Which folders of a tree are its train, test and valid parts, and which are classes: read from names and contents.

    Train/CLASS/*.jpg, Test/CLASS/*.jpg             names in any case, or their other forms: training, val, dev
    seg_train/..., seg_test/...                     the same word around all of them
    archive/mnist/train/...                         folders that hold nothing but another folder

Parts that cannot be told from classes without doubt are an error or a warning that names them. A folder of images, and
not of class folders, is a class whatever its name.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from lockstep.errors import DataError

Split = Literal["train", "valid", "test"]

_WORDS: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training", "trainval", "trn", "训练"), "train"),
    **dict.fromkeys(("test", "testing", "tst", "测试"), "test"),
    **dict.fromkeys(("valid", "val", "validation", "validate", "validating", "dev", "development", "验证"), "valid"),
}
_FILLERS = (
    *("set", "data", "dataset", "image", "images", "img", "imgs", "picture", "pictures", "photo", "photos"),
    *("sample", "samples", "split", "part", "folder", "dir", "数据", "图片", "图像", "样本", "集"),
)
# The longest first: a regular expression takes the first alternative that fits, and "train" fits "training".
_ALTERNATIVES = "|".join(sorted((*_WORDS, *_FILLERS), key=len, reverse=True))
_COMPOUND = re.compile(f"(?:{_ALTERNATIVES})+")
_WORD = re.compile(_ALTERNATIVES)
# TrainSet, trainSet, TRAIN_set and train2017 are two words each.
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\dA-Za-z_]+")
_EXPECTED = "expected DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg, with folders called train, test and valid"
_DEEPEST = 4  # folders that hold nothing but another folder; a link to a folder above would have no end


@dataclass(frozen=True, kw_only=True)
class SplitName:
    """What the name of a folder says: the parts that it speaks of, and its other words, in lower case."""

    splits: frozenset[Split]
    words: tuple[str, ...]

    @property
    def split(self) -> Split | None:
        """The part; None if the name speaks of none or of several."""
        # Validation images are held out of "trainval".
        splits = self.splits - {"valid"} if self.splits == {"train", "valid"} else self.splits
        return next(iter(splits)) if len(splits) == 1 else None


def read_split_name(name: str) -> SplitName:
    """Returns what a name says, such as ``Train``, ``trainingset`` or ``seg_test``; numbers are left out."""
    splits: set[Split] = set()
    words: list[str] = []
    for token in map(str.lower, _TOKEN.findall(name)):
        for word in _WORD.findall(token) if _COMPOUND.fullmatch(token) else [token]:
            if word in _WORDS:
                splits.add(_WORDS[word])
            elif word not in _FILLERS and not word.isdecimal():
                words.append(word)
    return SplitName(splits=frozenset(splits), words=tuple(words))


def split_folders(root: Path) -> dict[Split, Path]:
    """Returns split -> its folder of class folders; only "train", the tree itself, if the tree is not split.

    Warns of folders that are taken for classes and look like parts.

    Raises:
        DataError: the folders are parts of which some cannot be told; the message names them.
    """
    return _find_parts(root, _DEEPEST) or {"train": root}


@dataclass(frozen=True)
class _Tree:
    """A folder, and folder -> the names of its folders, of all folders in it."""

    root: Path
    folders: Mapping[Path, Sequence[str]]

    @classmethod
    def of(cls, root: Path) -> _Tree:
        return cls(root, {folder: [inner.name for inner in folders_in(folder)] for folder in folders_in(root)})

    @cached_property
    def names(self) -> Mapping[Path, SplitName]:
        """Folder -> what its name says, of those whose names are parts."""
        names = {folder: read_split_name(folder.name) for folder in self.folders}
        return {folder: name for folder, name in names.items() if name.split is not None}

    def has_parts(self) -> bool:
        """Whether there is a training part of class folders: called so, or as another part with class folders is."""
        trees = {folder: name for folder, name in self.names.items() if self.folders[folder]}
        training = [name.words for name in trees.values() if name.split == "train"]
        return any(not words or [name.words for name in trees.values()].count(words) > 1 for words in training)

    def refuse(self, fault: str, advice: str = "") -> DataError:
        quoted = ", ".join(repr(folder.name) for folder in self.folders)
        return DataError(f"the image folder {str(self.root)!r} holds {quoted}, {fault}; {_EXPECTED}{advice}")

    def warn(self, fact: str) -> None:
        quoted = ", ".join(repr(folder.name) for folder in list(self.folders)[:8])
        message = (
            f"the image folder {str(self.root)!r} holds {quoted}, which are taken for classes, {fact}, {_EXPECTED}"
        )
        warnings.warn(message, stacklevel=6)


def _find_parts(root: Path, depth: int) -> dict[Split, Path]:
    """Split -> its folder; empty if the tree is not split."""
    tree = _Tree.of(root)
    if len(tree.folders) == 1 and depth and (nested := _find_parts(next(iter(tree.folders)), depth - 1)):
        return nested  # an archive that holds one folder
    if not tree.has_parts():
        _check_classes(tree)
        return {}
    return _parts_by_split(tree)


def _parts_by_split(tree: _Tree) -> dict[Split, Path]:
    if unknown := [folder.name for folder in tree.folders if folder not in tree.names]:
        train = next(folder.name for folder, name in tree.names.items() if name.split == "train")
        raise DataError(
            f"the image folder {str(tree.root)!r} holds {train!r} and {unknown[0]!r}, which is not a split; {_EXPECTED}"
            "; move the other away; or, if all are classes, put the images of a class directly into its folder"
        )
    parts = {name.split: folder for folder, name in tree.names.items() if name.split is not None}
    if len(parts) < len(tree.folders) or len({name.words for name in tree.names.values()}) > 1:
        raise tree.refuse("and which of them are the training, test and validation images is not certain")
    if loose := [folder.name for folder, inner in tree.folders.items() if not inner]:
        raise tree.refuse(f"and {loose[0]!r} has no class folders", "; sort its images into them, or move it away")
    return {split: _innermost(folder, split) for split, folder in parts.items()}


def _innermost(part: Path, split: Split) -> Path:
    """The folder with the class folders: below seg_train there may be another seg_train, or a folder "images"."""
    inside = folders_in(part)
    if len(inside) == 1 and folders_in(inside[0]):
        name = read_split_name(inside[0].name)
        if name.split == split or not (name.words or name.splits):
            return _innermost(inside[0], split)
    return part


def _check_classes(tree: _Tree) -> None:
    """Refuses, or warns of, folders that would be classes and look like parts."""
    siblings = {folder.name.lower() for folder in tree.folders}
    for folder, inner in tree.folders.items():
        splits = [name.split for name in map(read_split_name, inner) if not name.words and name.split]
        if "train" in splits and len(splits) > 1:
            parts = ", ".join(map(repr, inner))
            raise tree.refuse(f"and {folder.name!r} holds the parts {parts}", "; move the parts above the classes")
        is_part = folder in tree.names and not tree.names[folder].words
        if is_part and inner and siblings.issuperset(map(str.lower, inner)):
            raise tree.refuse(f"and {folder.name!r} holds folders that are called like the folders beside it")
    if len(tree.folders) < 2:
        return
    training = any(name.split == "train" for name in tree.names.values())
    if len(tree.names) == len(tree.folders):
        if any(tree.folders.values()):
            raise tree.refuse("and which of them is the training part is not certain")
        if training:
            tree.warn("because images are directly in them; if they are parts of the data")
        return
    number = Counter(name.lower() for inner in tree.folders.values() for name in inner)
    if len(shared := sorted(name for name in number if number[name] > 1)) > 1:
        classes = ", ".join(map(repr, shared[:4]))
        tree.warn(f"and several of them hold the folders {classes}; if these are classes and those are parts")


def folders_in(folder: Path) -> list[Path]:
    """Returns the folders directly in a folder, sorted, without hidden ones."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))


def is_hidden(name: str) -> bool:
    """Whether a file or folder is ignored: a hidden one, or what macOS adds to archives."""
    return name.startswith(".") or name == "__MACOSX"
