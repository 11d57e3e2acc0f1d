from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.errors import DataError
from lockstep.recipes.images.dataset import load_images

if TYPE_CHECKING:
    from tests.recipes.images.conftest import MakeConfig, MakeTree


def break_pictures(folder: Path, number: int) -> None:
    for path in sorted(folder.iterdir())[:number]:
        path.write_bytes(b"")


def test_rows_and_labels_of_each_part_belong_together(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"train/a": 10, "train/b": 10, "test/b": 3})

    pictures = load_images(tiny(data=root))

    assert pictures.classes == ("a", "b")
    assert {part: len(chosen.rows) for part, chosen in pictures.splits.items()} == {"train": 18, "valid": 2, "test": 3}
    assert set(pictures.splits["test"].labels) == {1}
    assert sorted(row for chosen in pictures.splits.values() for row in chosen.rows) == list(range(23))
    green = pictures.store.pixels[list(pictures.splits["test"].rows), 0, 0, 1]
    assert green.tolist() == [0, 7, 14]


def test_a_few_broken_pictures_are_named_and_skipped(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 60, "b": 60})
    break_pictures(root / "b", 5)

    with pytest.warns(
        UserWarning, match=r"5 of 120 images cannot be read: '.*b/000.png' \(empty file\), .* and 2 more"
    ):
        pictures = load_images(tiny(data=root))

    assert [path.name for path in pictures.broken] == [f"{n:03}.png" for n in range(5)]
    rows = [row for chosen in pictures.splits.values() for row in chosen.rows]
    assert len(rows) == len(set(rows)) == 115
    assert not set(rows) & set(range(60, 65))


def test_the_parts_are_the_same_whether_a_picture_is_broken_or_not(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 60, "b": 60})
    before = load_images(tiny(data=root)).splits
    break_pictures(root / "b", 2)
    with pytest.warns(UserWarning, match="2 of 120"):
        after = load_images(tiny(data=root)).splits

    assert all(set(after[part].rows) == set(before[part].rows) - {60, 61} for part in after)


def test_more_broken_pictures_than_the_share_are_an_error(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 10, "b": 10})
    break_pictures(root / "a", 2)

    with pytest.raises(DataError, match=r"2 of 20 images cannot be read: .*; expected at most 0.05 of them \(max_bro"):
        load_images(tiny(data=root))
    with pytest.warns(UserWarning, match="they are skipped"):
        load_images(tiny(data=root, max_broken=0.1))


def test_nothing_but_broken_pictures_is_an_error_whatever_the_share(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 3, "b": 3})
    break_pictures(root / "a", 3)

    with (
        pytest.raises(DataError, match="no readable training image is left of the class 'a', expected at least one"),
        pytest.warns(UserWarning, match="3 of 6"),
    ):
        load_images(tiny(data=root, max_broken=1.0))


def test_a_test_part_of_nothing_is_an_error(make_tree: MakeTree, tiny: MakeConfig):
    with pytest.raises(DataError, match="no image is left for the test, expected at least one"):
        load_images(tiny(data=make_tree("data", {"a": 1, "b": 1})))


def test_what_is_left_out_and_what_has_no_effect_warns(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"train/a": 5, "train/b": 5, "test/b": 3, "other/a": 1})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_images(tiny(data=root, test_fraction=0.3))

    assert [str(warning.message) for warning in caught] == [
        f"ignored: the folder {str(root / 'other')!r}, which is not a split",
        "test_fraction=0.3 has no effect: the images have a test split",
    ]


def test_disk_and_memory_give_the_same_and_the_shares_do_not_matter_to_the_disk(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 12, "b": 12})
    memory = load_images(tiny(data=root))
    disk = tiny(data=root, cache="disk", cache_dir=root.parent / "cache")
    decoded: list[int] = []

    first = load_images(disk)
    other = load_images(
        tiny(data=root, cache="disk", cache_dir=root.parent / "cache", test_fraction=0.4),
        progress=lambda done, of: decoded.append(done),
    )

    assert (first.store.pixels == memory.store.pixels).all()
    assert first.splits == memory.splits
    assert len(other.splits["test"].rows) == 10
    assert decoded == []
