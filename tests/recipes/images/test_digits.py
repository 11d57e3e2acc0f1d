from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from tests.recipes.images.conftest import MakeConfig

from lockstep.errors import DataError
from lockstep_tools.recipes.images.dataset import read_digits, scan_folder, write_digits
from lockstep_tools.recipes.images.train import build_images


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "digits"
    assert write_digits(folder) == {"train": 1438, "test": 359}
    return folder


def test_all_real_pictures_are_there_once_with_their_greys():
    _, splits = read_digits()
    data = load_digits()
    pictures = [picture for part in splits.values() for picture in part]
    places = {int(picture.path.stem): picture for picture in pictures}
    assert sorted(places) == list(range(1797))
    assert all(picture.label == data.target[place] for place, picture in places.items())
    assert np.array_equal(np.asarray(places[7].embedded), np.round(data.images[7] * 255 / 16))


def test_the_last_fifth_of_each_digit_is_the_test():
    _, splits = read_digits()
    train, test = (Counter(picture.label for picture in splits[part]) for part in ("train", "test"))
    assert all(abs(test[digit] / (train[digit] + test[digit]) - 0.2) < 0.005 for digit in range(10))
    for digit in range(10):
        last = max(p.path.stem for p in splits["train"] if p.label == digit)
        assert last < min(p.path.stem for p in splits["test"] if p.label == digit)


def test_the_folder_is_a_tree_of_pngs(written: Path):
    classes, splits = scan_folder(written)
    assert classes == tuple("0123456789")
    assert {part: len(pictures) for part, pictures in splits.items()} == {"train": 1438, "test": 359}
    with Image.open(written / "train" / "0" / "0000.png") as image:
        assert (image.size, image.mode) == ((8, 8), "L")
    assert [path.name for path in written.parent.iterdir()] == ["digits"]


def test_training_on_the_folder_sees_the_pixels_of_the_default(written: Path, tiny: MakeConfig):
    embedded, files = (
        build_images(tiny(size=16)),
        build_images(tiny(size=16, data=written, workers=2)),
    )
    assert embedded.dataset.classes == files.dataset.classes
    for part in ("train", "valid", "test"):
        pairs = zip(getattr(embedded, part), getattr(files, part), strict=True)
        assert all(bool((a == b).all()) and bool((c == d).all()) for (a, c), (b, d) in pairs)


def test_an_empty_folder_is_taken(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    write_digits(tmp_path / "empty")
    assert len(list((tmp_path / "empty" / "test").iterdir())) == 10


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(DataError, match=r"mine' .*directory not empty.*; give a new or an empty folder"):
        write_digits(tmp_path / "mine")
    with pytest.raises(DataError, match=r"file' .*not a directory.*; give a new or an empty folder"):
        write_digits(tmp_path / "mine" / "file")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = []

    def full(image: Image.Image, path: Path) -> None:
        saved.append(path)
        path.write_bytes(b"half")
        if len(saved) == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)

    with pytest.raises(DataError, match=r"cannot be written to '.*digits' \(no space left on device\)"):
        write_digits(tmp_path / "digits")

    assert len(saved) == 5
    assert list(tmp_path.iterdir()) == []
