"""The picture of a run: read back as pixels, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.report import draw_curves

HISTORY = {
    "loss": [2.0, 1.5],
    "accuracy": [0.1, 0.2],
    "val_loss": [1.9, 1.6],
    "val_accuracy": [0.1, 0.2],
    "seconds": [3.0, 3.0],
}


def _colors(path: Path) -> set[tuple[int, ...]]:
    image = pytest.importorskip("PIL.Image").open(path).convert("RGB")
    return {color for _, color in image.getcolors(maxcolors=image.width * image.height)}


def test_draws_training_validation_and_test_in_their_colors(tmp_path: Path):
    written = draw_curves(HISTORY, tmp_path / "new" / "curves.png", title="a run", test={"loss": 1.55})

    assert written == tmp_path / "new" / "curves.png"
    assert {(0x2F, 0x5D, 0x8A), (0xD9, 0x82, 0x2B), (0x5C, 0x8A, 0x3C)} <= _colors(written)


def test_a_run_without_validation_draws_the_training_alone(tmp_path: Path):
    written = draw_curves({"loss": [2.0, 1.5]}, tmp_path / "curves.png", title="a run")

    assert (0xD9, 0x82, 0x2B) not in _colors(written)


def test_what_was_measured_in_validation_alone_has_a_panel_too(tmp_path: Path):
    pillow = pytest.importorskip("PIL.Image")
    history = {"loss": [2.0, 1.5], "val_loss": [1.9, 1.6], "val_f1": [0.5, 0.6]}

    one = draw_curves({"loss": [2.0, 1.5]}, tmp_path / "one.png", title="a run")
    two = draw_curves(history, tmp_path / "two.png", title="a run", test={"f1": 0.6})

    assert pillow.open(two).width > 1.9 * pillow.open(one).width


def test_nothing_but_the_picture_is_left_in_the_folder(tmp_path: Path):
    draw_curves(HISTORY, tmp_path / "curves.png", title="a run")

    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_picture_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "curves.png").mkdir()

    with pytest.raises(OSError, match=r"curves\.png"):
        draw_curves(HISTORY, tmp_path / "curves.png", title="a run")

    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_history_without_an_epoch_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a history of \['loss'\] holds no epoch to draw"):
        draw_curves({"loss": []}, tmp_path / "curves.png", title="a run")

    assert list(tmp_path.iterdir()) == []
