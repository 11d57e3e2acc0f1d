"""``lockstep data images`` and ``lockstep data digits``."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from lockstep.cli import main
from lockstep.cli.data import images_summary
from lockstep.recipes.images.dataset import ImageSummary

SUMMARY = ImageSummary(
    source="pets",
    classes=("Cat", "Dog"),
    counts={"train": (10_000, 9_000), "valid": (1_250, 1_250), "test": (1_250, 1_250)},
    rule="the splits are those of the data",
    sizes={(500, 375): 20_000, (4, 4): 1, (1050, 702): 1},
    broken={Path(f"Cat/{n}.jpg"): "empty file" for n in range(12)},
    ignored=("the folder 'extra' beside the parts",),
)


def test_classes_sizes_and_broken_pictures_are_shown():
    shown = images_summary(SUMMARY)
    rows = [line.split() for line in shown.splitlines()]

    assert rows[0] == ["images:", "pets"]
    assert rows[2] == ["class", "train", "valid", "test"]
    assert rows[4:7] == [
        ["Cat", "10,000", "1,250", "1,250"],
        ["Dog", "9,000", "1,250", "1,250"],
        ["all", "19,000", "2,500", "2,500"],
    ]
    assert "sizes   from 4x4 to 1050x702, most often 500x375 (20,000)" in shown
    assert "decoded 3.6 GB at 224x224" in shown
    assert "ignored the folder 'extra'" in shown
    assert "broken  12 of 24,000 images (0.05%)" in shown
    assert shown.splitlines()[-1] == "broken  and 2 more"
    assert max(map(len, shown.splitlines())) < 120


def test_the_embedded_digits_are_described(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "images"]) == 0

    shown = capsys.readouterr().out
    assert shown.startswith("images: scikit-learn's digits\n")
    assert ["all", "1,295", "143", "359"] in [line.split() for line in shown.splitlines()]
    assert "sizes   from 8x8 to 8x8\n" in shown


def test_a_folder_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for of_class in ("a", "b"):
        (tmp_path / of_class).mkdir()
        for n in range(10):
            Image.new("RGB", (3, 2)).save(tmp_path / of_class / f"{n}.jpg")
    (tmp_path / "a" / "5.jpg").write_bytes(b"")

    assert main(["data", "images", "--data", str(tmp_path), "--workers", "1"]) == 0

    shown = capsys.readouterr().out
    assert ["all", "16", "2", "2"] in [line.split() for line in shown.splitlines()]
    assert f"broken  {tmp_path / 'a' / '5.jpg'} (empty file)" in shown


def test_the_digits_are_written_and_never_over_something(run_lockstep, tmp_path: Path):
    first = run_lockstep("data", "digits", "here")
    again = run_lockstep("data", "digits", "here")
    without = run_lockstep("data", "digits")

    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == (
        "digits written to here: train 1,438, test 359; train on them with: lockstep train images --data here\n"
    )
    assert len(list((tmp_path / "here").rglob("*.png"))) == 1797
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == (
        "lockstep: error: the folder 'here' is not empty, expected a new or an empty one; give another one\n"
    )
    assert without.returncode == 2
    assert without.stderr.count("\n") == 1


def test_a_folder_that_is_none_is_one_line(run_lockstep):
    done = run_lockstep("data", "images", "--data", "nowhere")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: error: the image folder 'nowhere' does not exist")
