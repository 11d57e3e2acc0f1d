from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.recipes.images.conftest import MakeTree

from lockstep.errors import DataError
from lockstep_tools.recipes.images.dataset import scan_folder


def counts(tree_root: Path) -> dict[str, int]:
    return {part: len(pictures) for part, pictures in scan_folder(tree_root)[1].items()}


def test_a_tree_of_class_folders_is_one_part_with_sorted_classes(make_tree: MakeTree):
    classes, splits = scan_folder(make_tree("data", {"tulip": 2, "daisy": 3}))

    assert classes == ("daisy", "tulip")
    assert [(p.name, p.label) for p in splits["train"]] == [
        ("daisy/000.png", 0),
        ("daisy/001.png", 0),
        ("daisy/002.png", 0),
        ("tulip/000.png", 1),
        ("tulip/001.png", 1),
    ]


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("train", "test"), {"train": 3, "test": 3}),
        (("train", "test", "val"), {"train": 3, "test": 3, "valid": 3}),
        (("train", "validation"), {"train": 3, "valid": 3}),
    ],
)
def test_parts_are_known_by_their_usual_names(names: tuple[str, ...], parts: dict[str, int], make_tree: MakeTree):
    root = make_tree("data", {f"{part}/{of_class}": n for part in names for of_class, n in {"a": 1, "b": 2}.items()})
    assert counts(root) == parts


def test_cats_vs_dogs_as_unpacked(make_tree: MakeTree):
    root = make_tree("archive", {"PetImages/Cat": 2, "PetImages/Dog": 2}, suffix=".jpg")
    (root / "readme[1].txt").write_text("terms")
    (root / "PetImages" / "Cat" / "Thumbs.db").write_bytes(b"thumbs")
    classes, _ = scan_folder(root / "PetImages")
    assert (classes, counts(root / "PetImages")) == (("Cat", "Dog"), {"train": 4})


def test_tf_flowers_as_unpacked(make_tree: MakeTree):
    names = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    root = make_tree("flower_photos", dict.fromkeys(names, 2), suffix=".jpg")
    (root / "LICENSE.txt").write_text("CC-BY")
    assert scan_folder(root)[0] == names


def test_mnist_as_folders(make_tree: MakeTree):
    root = make_tree("mnist", {f"{part}/{digit}": 1 for part in ("train", "test") for digit in range(10)})
    classes, splits = scan_folder(root)
    assert classes == tuple("0123456789")
    assert [picture.label for picture in splits["test"]] == list(range(10))


def test_a_class_may_be_called_train(make_tree: MakeTree):
    root = make_tree("vehicles", {"train": 2, "bus": 2, "test": 2})
    assert scan_folder(root)[0] == ("bus", "test", "train")


def test_formats_of_any_case_are_taken_and_other_and_hidden_files_are_not(make_tree: MakeTree):
    root = make_tree("data", {"a": 1, "b": 1})
    names = ["1.PNG", "2.jpg", "3.JPEG", "4.bmp", "5.WebP", "6.gif", ".7.png", "8.txt", "9"]
    for name in names:
        (root / "a" / name).write_bytes(b"")
    os.mkfifo(root / "a" / "pipe.png")
    (root / ".hidden").mkdir()
    (root / "__MACOSX").mkdir()

    taken = [picture.path.name for picture in scan_folder(root)[1]["train"] if picture.label == 0]

    assert taken == ["000.png", "1.PNG", "2.jpg", "3.JPEG", "4.bmp", "5.WebP", "6.gif"]


def test_pictures_in_deeper_folders_belong_to_their_class(make_tree: MakeTree):
    root = make_tree("data", {"a/b/a": 1, "b": 1})
    _, splits = scan_folder(root)
    assert [(picture.name, picture.label) for picture in splits["train"]] == [
        ("a/b/a/000.png", 0),
        ("b/000.png", 1),
    ]


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        ({}, "has these classes and images: none; expected at least two folders"),
        ({"a": 0, "b": 0}, "a: 0, b: 0"),
        ({"a": 2}, "a: 2; expected at least two"),
        ({"a": 2, "b": 0}, "a: 2, b: 0"),
        (
            {"train/a": 1, "train/b": 1, "test/c": 1},
            "c: 1; expected at least two folders, the same",
        ),
        ({"train/a": 1, "train/b": 1, "test/a": 0}, "a: 0"),
        ({"train/a": 1, "train/b": 1, "extra/a": 1}, "holds 'train' and 'extra', which is not a split"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(folders: dict[str, int], said: str, make_tree: MakeTree, tmp_path: Path):
    root = make_tree("data", {**folders, ".hidden": 0})
    with pytest.raises(DataError) as caught:
        scan_folder(root)
    assert said in str(caught.value)
    assert str(root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(DataError, match=f"{name}' does not exist or is not a folder; expected one folder of"):
            scan_folder(tmp_path / name)
