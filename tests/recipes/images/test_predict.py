"""Classes of new images: the table, the contact sheet, files that cannot be read, and any number of replicas."""

from __future__ import annotations

import csv
import io
import json
import shutil
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, DataError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.cli import main
from lockstep_tools.recipes.images.predict import (
    Predictions,
    draw_contact_sheet,
    find_files,
    load_trained,
    predict_files,
    render_table,
)
from lockstep_tools.recipes.images.train import train_images

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.recipes.images.conftest import MakeConfig, MakeTree

    SplitCpu = Callable[[int], tuple[LogicalDevice, ...]]


@pytest.mark.parametrize("hidden", [0, 6])
def test_a_trained_folder_gives_the_probabilities_of_its_module_on_any_number_of_replicas(
    hidden: int, make_tree: MakeTree, tiny: MakeConfig, split_cpu: SplitCpu, tmp_path: Path
):
    data = make_tree("data", {"cat": 12, "dog": 12})
    config = tiny(data=data, hidden=hidden, learning_rate=0.01)
    with closing(MirroredStrategy(list(split_cpu(3)[:1]), seed=0)) as strategy:
        train_images(config, strategy, output_dir=tmp_path / "run" / "model", verbose=0)
    files = find_files([data])
    found = []
    for replicas, batch_size in ((1, 64), (3, 7)):
        with closing(MirroredStrategy(list(split_cpu(3)[:replicas]), seed=0)) as strategy:
            classifier = load_trained(str(tmp_path / "run"))
            found.append(predict_files(classifier, files, strategy, batch_size=batch_size))

    assert found[0].classes == ("cat", "dog")
    assert found[0].files == found[1].files == files
    assert torch.allclose(found[0].probabilities, found[1].probabilities, atol=1e-6)
    assert torch.allclose(found[0].probabilities.sum(dim=1), torch.ones(24))
    first = torch.frombuffer(
        bytearray(Image.open(files[0]).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR).tobytes()),
        dtype=torch.uint8,
    )
    logits = classifier.module.eval()(first.view(1, 8, 8, 3).permute(0, 3, 1, 2) / 255)
    assert torch.allclose(logits.softmax(dim=1)[0], found[0].probabilities[0], atol=1e-6)


@pytest.fixture
def predictions(make_tree: MakeTree) -> Predictions:
    files = find_files([make_tree("new", {"a": 2, "b": 1})])
    return Predictions(
        classes=("low", "high, or not"),
        files=files,
        probabilities=torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.55, 0.45]]),
        broken={Path("bad.png"): "truncated"},
    )


def test_the_table_has_a_row_for_each_file_and_the_broken_ones_last(predictions: Predictions):
    rows = list(csv.DictReader(io.StringIO(render_table(predictions))))
    assert [row["file"] for row in rows] == [*map(str, predictions.files), "bad.png"]
    assert [row["class"] for row in rows] == ["low", "high, or not", "low", ""]
    assert [row["probability"] for row in rows[:3]] == ["0.900000", "0.600000", "0.550000"]
    assert float(rows[1]["low"]) == pytest.approx(0.4)
    assert [row["error"] for row in rows] == ["", "", "", "truncated"]


def test_the_contact_sheet_shows_the_least_certain_picture_first(predictions: Predictions):
    sheet = draw_contact_sheet(predictions)
    assert sheet.size == (960, 196)
    colors = [sheet.getpixel((160 * place + 80, 80)) for place in range(4)]
    expected = [Image.open(predictions.files[index]).convert("RGB").getpixel((5, 5)) for index in (2, 1, 0)]
    assert colors == [*expected, (255, 255, 255)]


def test_files_that_cannot_be_read_are_left_out_and_listed(
    make_tree: MakeTree, tiny: MakeConfig, split_cpu: SplitCpu, tmp_path: Path
):
    data = make_tree("data", {"a": 6, "b": 6})
    with closing(MirroredStrategy(list(split_cpu(2)), seed=0)) as strategy:
        train_images(tiny(data=data), strategy, output_dir=tmp_path / "model", verbose=0)
        classifier = load_trained(str(tmp_path / "model"))
        for name in ("001.png", "003.png"):
            (data / "a" / name).write_bytes(b"no image")
        some = predict_files(classifier, find_files([data]), strategy, batch_size=2)
        with pytest.raises(DataError, match=r"none of the 1 files can be read as an image, such as '.*001.png'"):
            predict_files(classifier, [data / "a" / "001.png"], strategy)

    assert sorted(path.name for path in some.broken) == ["001.png", "003.png"]
    assert len(some.files) == len(some.probabilities) == 10


def test_paths_that_are_not_there_or_hold_no_image_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere' does not exist; expected an image, or a folder of images"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no image is in"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("interrupted", "has no model: .* goes on with --resume"),
        ("photo.jpg", "is a file; expected the folder of a finished run"),
        ("nowhere", "does not exist; expected the folder of a finished run"),
        ("texts", "has a BertForMaskedLM, expected an image classifier"),
    ],
)
def test_a_path_without_an_image_classifier_is_refused(tmp_path: Path, name: str, reason: str):
    (tmp_path / "interrupted" / "backup").mkdir(parents=True)
    (tmp_path / "photo.jpg").touch()
    (tmp_path / "texts" / "model").mkdir(parents=True)
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (tmp_path / "texts" / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        load_trained(str(tmp_path / name))


def test_letters_that_pillow_s_font_lacks_are_drawn_with_one_of_the_system(
    predictions: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    matplotlib = pytest.importorskip("matplotlib")
    russian = replace(predictions, classes=("кот", "пёс"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    with pytest.warns(UserWarning, match="no font of this machine has all letters of 'кот'.* says class 0"):
        numbers = draw_contact_sheet(russian)
    (tmp_path / "fonts").mkdir()
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    shutil.copy(font, tmp_path / "fonts" / "DejaVuSans.ttf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = draw_contact_sheet(russian)

    assert names.tobytes() != numbers.tobytes()


def test_several_workers_are_refused_before_they_write_the_same_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    assert main(["predict", "model", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "the environment declares 2 workers" in capsys.readouterr().err


def test_the_model_is_looked_at_before_the_files(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}))
    assert main(["predict", str(tmp_path), str(tmp_path), "--output", str(tmp_path / "out")]) == 2  # without an image
    assert "has a BertForMaskedLM" in capsys.readouterr().err
