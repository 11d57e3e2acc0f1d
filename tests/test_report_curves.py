"""The picture of a run: read back as pixels, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.train.curves import draw_curves
from lockstep.train.logs import History
from lockstep_tools.report import write_curves


def history(*epochs: dict[str, float], first: int = 0) -> History:
    found = History()
    for epoch, logs in enumerate(epochs, first):
        found.add(epoch, logs)
    return found


TRAINED = history({"loss": 2.0}, {"loss": 1.5})
VALIDATED = history({"loss": 2.0, "val_loss": 1.9}, {"loss": 1.5, "val_loss": 1.6})


def _colors(path: Path) -> set[tuple[int, ...]]:
    image = pytest.importorskip("PIL.Image").open(path).convert("RGB")
    return {color for _, color in image.getcolors(maxcolors=image.width * image.height)}


def test_draws_training_validation_and_test_in_their_colors(tmp_path: Path):
    written = write_curves(VALIDATED, tmp_path / "new" / "curves.png", title="a run", test={"loss": 1.55})
    assert written == tmp_path / "new" / "curves.png"
    assert {(0x2F, 0x5D, 0x8A), (0xD9, 0x82, 0x2B), (0x5C, 0x8A, 0x3C)} <= _colors(written)


def test_a_run_without_validation_draws_the_training_alone(tmp_path: Path):
    written = write_curves(TRAINED, tmp_path / "curves.png", title="a run")
    assert (0xD9, 0x82, 0x2B) not in _colors(written)


def test_what_was_measured_in_validation_alone_has_a_panel_too(tmp_path: Path):
    pillow = pytest.importorskip("PIL.Image")
    one = write_curves(TRAINED, tmp_path / "one.png", title="a run")
    two = write_curves(history({"loss": 2.0, "val_f1": 0.5}), tmp_path / "two.png", title="a run", test={"f1": 0.6})
    assert pillow.open(two).width > 1.9 * pillow.open(one).width


def test_a_notebook_and_the_file_show_the_same_curves_from_the_epochs_that_were_trained():
    pytest.importorskip("matplotlib")
    resumed = history({"loss": 2.0}, {"loss": 1.5, "val_loss": 1.6}, first=3)
    (axes,) = resumed.plot().axes
    assert [line.get_color() for line in axes.lines] == ["#2f5d8a", "#d9822b"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[4, 5], [5]]
    assert axes.get_xlim() == (3.5, 5.5)


def test_the_labels_of_the_axis_are_whole_at_the_first_drawing():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    canvas = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    logs = {"loss": 8.0275, "accuracy": 0.1147, "val_loss": 7.9275, "val_accuracy": 0.0}

    draw_curves(figure, history(logs), title="a run", settings="a=1, " * 10, test={"loss": 6.1234, "accuracy": 0.3})
    canvas.draw()

    (axes, _), (lowest, highest) = figure.axes, figure.axes[0].get_ylim()
    labels = [tick.label1 for tick in axes.yaxis.get_major_ticks() if lowest <= tick.get_loc() <= highest]
    assert labels[0].get_text() == "6.25"
    assert min(label.get_window_extent(canvas.get_renderer()).x0 for label in labels) >= 0


def test_nothing_but_the_picture_is_left_in_the_folder(tmp_path: Path):
    write_curves(VALIDATED, tmp_path / "curves.png", title="a run")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_picture_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "curves.png").mkdir()
    with pytest.raises(OSError, match=r"curves\.png"):
        write_curves(VALIDATED, tmp_path / "curves.png", title="a run")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_history_without_an_epoch_is_an_error_that_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="no epoch to draw"):
        write_curves(History(), tmp_path / "curves.png", title="a run")
    assert list(tmp_path.iterdir()) == []
