from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.errors import DataError
from lockstep.recipes.images.folder import scan_folder

if TYPE_CHECKING:
    from tests.recipes.images.conftest import MakeTree


def counts(tree_root: Path) -> dict[str, int]:
    return {part: len(pictures) for part, pictures in scan_folder(tree_root).splits.items()}


def test_a_tree_of_class_folders_is_one_part_with_sorted_classes(make_tree: MakeTree):
    tree = scan_folder(make_tree("data", {"tulip": 2, "daisy": 3}))

    assert tree.classes == ("daisy", "tulip")
    assert [(p.name, p.label) for p in tree.splits["train"]] == [
        ("daisy/000.png", 0),
        ("daisy/001.png", 0),
        ("daisy/002.png", 0),
        ("tulip/000.png", 1),
        ("tulip/001.png", 1),
    ]
    assert tree.ignored == ()


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("train", "test"), {"train": 3, "test": 3}),
        (("Training", "TESTING", "val"), {"train": 3, "test": 3, "valid": 3}),
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

    for folder in (root, root / "PetImages"):
        tree = scan_folder(folder)
        assert (tree.classes, counts(folder), tree.ignored) == (("Cat", "Dog"), {"train": 4}, ())


def test_tf_flowers_as_unpacked(make_tree: MakeTree):
    names = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    root = make_tree("flower_photos", dict.fromkeys(names, 2), suffix=".jpg")
    (root / "LICENSE.txt").write_text("CC-BY")

    assert scan_folder(root).classes == names
    assert scan_folder(root.parent).classes == names


def test_mnist_as_folders(make_tree: MakeTree):
    root = make_tree("mnist", {f"{part}/{digit}": 1 for part in ("train", "test") for digit in range(10)})

    tree = scan_folder(root)

    assert tree.classes == tuple("0123456789")
    assert [picture.label for picture in tree.splits["test"]] == list(range(10))


def test_a_class_may_be_called_train(make_tree: MakeTree):
    root = make_tree("vehicles", {"train": 2, "bus": 2, "test": 2})

    assert scan_folder(root).classes == ("bus", "test", "train")


def test_formats_of_any_case_are_taken_and_other_and_hidden_files_are_not(make_tree: MakeTree):
    root = make_tree("data", {"a": 1, "b": 1})
    names = ["1.PNG", "2.jpg", "3.JPEG", "4.bmp", "5.WebP", "6.gif", ".7.png", "8.txt", "9"]
    for name in names:
        (root / "a" / name).write_bytes(b"")
    os.mkfifo(root / "a" / "pipe.png")
    (root / ".hidden").mkdir()
    (root / "__MACOSX").mkdir()

    taken = [picture.path.name for picture in scan_folder(root).splits["train"] if picture.label == 0]

    assert taken == ["000.png", "1.PNG", "2.jpg", "3.JPEG", "4.bmp", "5.WebP", "6.gif"]


def test_pictures_in_deeper_folders_belong_to_their_class(make_tree: MakeTree):
    root = make_tree("data", {"a/b/a": 1, "b": 1})

    tree = scan_folder(root)

    assert [(picture.name, picture.label) for picture in tree.splits["train"]] == [
        ("a/b/a/000.png", 0),
        ("b/000.png", 1),
    ]


def test_what_lies_beside_is_named(make_tree: MakeTree):
    divided = make_tree("divided", {"train/a": 1, "train/b": 1, "test/a": 1, "extra/a": 1})
    (divided / "test" / "loose.png").write_bytes(b"")
    whole = make_tree("whole", {"a": 1, "b": 1})
    (whole / "loose.png").write_bytes(b"")

    assert scan_folder(divided).ignored == (
        f"the folder {str(divided / 'extra')!r}, which is not a split",
        f"1 image in {str(divided / 'test')!r} outside of the class folders",
    )
    assert scan_folder(whole).ignored == (f"1 image in {str(whole)!r} outside of the class folders",)


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        ({}, "holds no images, expected a folder of images (bmp, gif, jpeg, jpg, png, webp) for each class"),
        ({"a": 0, "b": 0}, "holds no images"),
        ({"a": 2}, "has one class folder, 'a', expected at least two"),
        ({"a": 2, "b": 0}, "1 class folder without an image: "),
        ({"a": 1, "b": 0, "c": 0, "d": 0, "e": 0}, "4 class folders without an image: "),
        ({"train/a": 1, "train/b": 1, "test/c": 1}, "has 1 class that the training split "),
        ({"train/a": 1, "train/b": 1, "test/a": 0}, "holds no images"),
        ({"train/a": 1, "train/b": 1, "Train/a": 1, "Train/b": 1}, "'Train' and 'train', which both mean"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(folders: dict[str, int], said: str, make_tree: MakeTree, tmp_path: Path):
    root = make_tree("data", {**folders, ".hidden": 0})

    with pytest.raises(DataError) as caught:
        scan_folder(root)

    assert said in str(caught.value)
    assert str(root) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_class_folder_is_named(make_tree: MakeTree):
    root = make_tree("data", {"a": 1, "b": 0})

    with pytest.raises(DataError, match=r"without an image: '.*/data/b'; expected at least one image in each"):
        scan_folder(root)


def test_pictures_without_class_folders_are_refused(make_tree: MakeTree):
    root = make_tree("data", {"flat": 3})

    make_tree("divided", {"train/a": 1, "train/b": 1, "test": 2})
    with pytest.raises(DataError, match="divided/test' holds 2 images outside of class folders"):
        scan_folder(root.parent / "divided")
    with pytest.raises(DataError, match="has one class folder, 'flat'"):
        scan_folder(root)
    with pytest.raises(DataError, match="holds 3 images outside of class folders"):
        scan_folder(root / "flat")


def test_what_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")

    with pytest.raises(
        DataError, match="nowhere' does not exist; expected a folder with one folder of images for each"
    ):
        scan_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="file' is not a folder"):
        scan_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(make_tree: MakeTree):
    root = make_tree("data", {"a": 1, "b": 1})
    (root / "b").chmod(0)

    with pytest.raises(DataError, match=r"b' cannot be read \(permission denied\)"):
        scan_folder(root)
