"""Parts of a tree under the names that people give them, classes with such names, and what is told in doubt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.recipes.images.conftest import MakeTree

from lockstep.errors import DataError
from lockstep_tools.recipes.images.dataset import scan_folder


def parts_of(root: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    classes, splits = scan_folder(root)
    return classes, {part: len(images) for part, images in splits.items()}


def of_classes(*folders: str) -> dict[str, int]:
    """One image of "a" and two of "b" in each folder."""
    return {f"{folder}/{name}": number for folder in folders for name, number in {"a": 1, "b": 2}.items()}


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "Test"),
        ("TRAIN", "VAL"),
        ("training", "testing"),
        ("training", "testing", "validation"),
        ("seg_train", "seg_test"),
        ("train_set", "test_set"),
        ("trainset", "testset", "valset"),
        ("TrainingSet", "TestSet"),
        ("Training Set", "Test Set", "Dev Set"),
        ("train-data", "dev-data"),
        ("traindata", "testdata"),
        ("mnist_train", "mnist_test"),
        ("train.cats", "test.cats", "val.cats"),
        ("train2017", "val2017"),
        ("images_train", "images_test"),
        ("train_60000", "test_10000"),
        ("trainval", "test"),
        ("训练集", "测试集", "验证集"),
    ],
)
def test_parts_are_read_from_names_in_every_form(names: tuple[str, ...], make_tree: MakeTree):
    classes, counts = parts_of(make_tree("data", of_classes(*names)))
    assert classes == ("a", "b")
    assert counts == dict.fromkeys(["train", "test", "valid"][: len(names)], 3) or len(names) == 2
    assert sum(counts.values()) == 3 * len(names)
    assert counts["train"] == 3


@pytest.mark.parametrize(
    ("folders", "counts"),
    [
        (of_classes("mnist_png/training", "mnist_png/testing"), {"train": 3, "test": 3}),
        (of_classes("a/b/c/Train", "a/b/c/Val"), {"train": 3, "valid": 3}),
        (of_classes("seg_train/seg_train", "seg_test/seg_test"), {"train": 3, "test": 3}),
        (of_classes("train/images", "test/images"), {"train": 3, "test": 3}),
        ({**of_classes("train"), "test/a/indoor": 1, "test/a/outdoor": 1}, {"train": 3, "test": 2}),
        (of_classes("training_data/train", "training_data/test"), {"train": 3, "test": 3}),
    ],
)
def test_parts_are_found_below_folders_that_hold_nothing_else(
    folders: dict[str, int], counts: dict[str, int], make_tree: MakeTree
):
    assert parts_of(make_tree("data", folders)) == (("a", "b"), counts)


@pytest.mark.parametrize(
    "folders",
    [
        {"Train": 1, "Bus": 1},
        {"train": 1, "bus": 1, "test": 1},
        {"train_station/day": 1, "train_station/night": 1, "bus_station/old": 1},
        {"test tube/full": 1, "flask/round": 1},
        {"test": 1, "control": 1},
        {"training": 1, "match": 1, "training shoe": 1},
        {"valid coin": 1, "invalid coin": 1},
        {"latest": 1, "contest": 1, "trainer": 1},
    ],
)
def test_classes_may_have_such_names(folders: dict[str, int], make_tree: MakeTree):
    classes, counts = parts_of(make_tree("data", folders))
    assert set(classes) == {name.partition("/")[0] for name in folders}
    assert counts == {"train": len(folders)}


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (of_classes("seg_train", "seg_test", "seg_pred"), "holds 'seg_train' and 'seg_pred', which is not a split"),
        (of_classes("Train", "Eval"), "holds 'Train' and 'Eval', which is not a split"),
        (of_classes("train", "training", "test"), "'test', 'train', 'training', and which of them are the training"),
        (of_classes("mnist_train", "test"), "'mnist_train', 'test', and which of them"),
        (of_classes("train_a", "test_a", "train_b", "test_b"), "'train_b', and which of them"),
        (of_classes("Test", "Valid"), "'Test', 'Valid', and which of them is the training part is not certain"),
        ({**of_classes("Train"), "Test": 4}, "'Test', 'Train', and 'Test' has no class folders"),
        ({**of_classes("train", "test"), "valid": 0}, "'valid' has no class folders"),
        ({**of_classes("Test"), "Train": 4}, "'Test', 'Train', and which of them is the training part"),
        ({"cat/train": 1, "cat/test": 1, "dog/train": 1, "dog/test": 1}, "'cat' holds the parts 'test', 'train'"),
        ({"a": 2, "b": 2, **of_classes("Test")}, "'Test' holds folders that are called like the folders beside it"),
    ],
)
def test_parts_that_cannot_be_told_apart_are_refused(folders: dict[str, int], told: str, make_tree: MakeTree):
    root = make_tree("data", folders)
    with pytest.raises(DataError, match="train/CLASS") as raised:
        scan_folder(root)
    assert told in str(raised.value)
    assert str(root) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        ({"train": 2, "test": 2}, "'test', 'train', which are taken for classes, because images are directly in them"),
        (of_classes("entrenamiento", "prueba"), "and several of them hold the folders 'a', 'b'"),
        ({**of_classes("learn"), "holdout/B": 1, "holdout/a": 1, "holdout/c": 1}, "hold the folders 'a', 'b'"),
    ],
)
def test_classes_that_look_like_parts_are_warned_of(folders: dict[str, int], told: str, make_tree: MakeTree):
    root = make_tree("data", folders)
    with pytest.warns(UserWarning, match="train/CLASS") as caught:
        classes, _ = scan_folder(root)
    assert classes == tuple(sorted({name.partition("/")[0] for name in folders}))
    assert told in str(caught[0].message)


def test_a_tree_below_a_single_folder_is_named(make_tree: MakeTree):
    root = make_tree("data", of_classes("flower_photos"))
    with pytest.raises(DataError, match=f"give --data {root / 'flower_photos'}"):
        scan_folder(root)


def test_a_link_to_a_folder_above_has_an_end(make_tree: MakeTree):
    root = make_tree("data", {".hidden": 0})
    (root / "loop").symlink_to(root)
    with pytest.raises(DataError, match="expected at least two folders"):
        scan_folder(root)
