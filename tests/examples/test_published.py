"""The programs of ``examples/published``, for some steps on small data of the published kinds."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.conftest import FreePorts

pytestmark = pytest.mark.slow


os.environ.setdefault("KERAS_BACKEND", "torch")  # before any test imports Keras
pytest.importorskip("keras")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "published"
KERAS_HUB = ROOT / ".venv-peers" / "keras_hub"  # as `make .venv-peers/keras_hub/.installed` makes it
LIMIT_S = 240
Run = Callable[..., str]


@pytest.fixture
def run(
    fresh_devices: object,
    one_core: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """``run(name, *words)``: runs a program in this process; what it prints, of a progress bar the last state."""

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return "\n".join(line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n"))

    return run


def numbers(printed: str) -> list[float]:
    """The losses and accuracies, in the order in which they are printed."""
    return [float(number) for number in re.findall(r"(?:loss|accuracy):? ([\d.]+(?:e-?\d+)?)", printed)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """``pictures(classes)``: a tree of folders of noise, three pictures for training and one for the test in each."""

    def write(classes: int) -> str:
        folder = tmp_path_factory.mktemp("pictures")
        noise = np.random.default_rng(0)
        for index in range(4 * classes):
            place = folder / ("test" if index >= 3 * classes else "train") / f"{index % classes}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(256, size=(32, 32, 3), dtype="uint8")).save(place / f"{index}.png")
        return str(folder)

    return write


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 30)
def test_two_hosts_with_tf_config_print_the_numbers_of_two_devices(
    run: Run, pictures: Callable[[int], str], python: Callable[..., Any], free_ports: FreePorts
):
    words = ["--data", pictures(2), "--epochs", "2"]
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    program = str(FOLDER / "mobilenet_workers.py")
    hosts = [
        python(program, "--workers", addresses, "--index", str(index), *words, OMP_NUM_THREADS="1")
        for index in range(2)
    ]
    expected = numbers(run("mobilenet", "--devices", "cpu:2", *words))
    outcomes = [host.communicate(LIMIT_S) for host in hosts]

    assert len(expected) == 4
    for host, (printed, errors) in zip(hosts, outcomes, strict=True):
        assert host.returncode == 0, errors
        assert numbers(printed) == expected


@pytest.mark.filterwarnings("error:the step calls the model:UserWarning")  # on a batch that was not divided
def test_a_loop_divides_its_data_among_devices_picked_by_name(
    run: Run, pictures: Callable[[int], str], split_cpu: Callable[[int], object]
):
    split_cpu(3)

    printed = run(
        "mnist_loop", "--devices", "cpu:0,cpu:2", "--data", pictures(10), "--batch-size", "8", "--epochs", "1"
    )

    loss, accuracy, tested = numbers(printed)
    assert "Number of devices: 2" in printed
    assert 1.8 < loss < 3.2  # by chance ln(10); of means of shards that are added up twice that
    assert 0 <= accuracy <= 1
    assert 0 <= tested <= 1


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A CSV file in the form of ChnSentiCorp: a byte order mark, and a row without a review."""
    path = tmp_path / "reviews.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["label", "review"])
        rows.writerow([1, ""])
        rows.writerows([number % 2, f"{'很好' if number % 2 else '太差'}的酒店，第{number}次"] for number in range(60))
    return path


@pytest.mark.parametrize("source", ["csv", "embedded"])
def test_reviews_are_trained_on_evaluated_predicted_and_named(source: str, run: Run, reviews: Path, tmp_path: Path):
    data = {"csv": ["--data", str(reviews)], "embedded": ["--rows", "50"]}[source]
    printed = run("reviews", "--devices", "cpu:2", "--epochs", "1", "--output", str(tmp_path / "run"), *data)
    for prefix in ("eval", "test"):
        for metric in ("loss", "accuracy", "f1"):
            assert re.search(rf"'{prefix}_{metric}': \d", printed)
    assert re.search(r"\[\{'label': '(差评|好评)！', 'score': 0\.\d+\}\]", printed)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()  # 54 or 45 rows are one batch
    assert checkpoint.name == "checkpoint-1"


def run_with_keras_hub(*words: str, folder: Path) -> str:
    """What a program prints in an interpreter that has KerasHub. The test is skipped where there is none."""
    if find_spec("keras_hub") is None and not (KERAS_HUB / ".installed").exists():
        pytest.skip("KerasHub is not installed; `make .venv-peers/keras_hub/.installed` installs it beside")
    paths = [str(KERAS_HUB), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(LIMIT_S + 30)
def test_masked_words_of_keras_hub_are_learnt_on_four_devices(tmp_path: Path):
    words = np.random.default_rng(0).choice(["one", "two", "three", "device", "devices", "replica", "model"], (27, 30))
    for split, rows in (("train", words[:19]), ("valid", words[19:23]), ("test", words[23:])):
        lines = [*(" ".join(row) for row in rows), " = too short = "]
        (tmp_path / f"wiki.{split}.tokens").write_text("\r\n".join(lines))
    sizes = ["--vocabulary", "60", "--sequence-length", "24", "--batch-size", "8", "--epochs", "2"]

    printed = run_with_keras_hub(
        str(FOLDER / "masked_lm.py"), "--data", str(tmp_path), *sizes, "--log-dir", "logs", folder=tmp_path
    )

    assert "Number of devices: 4" in printed
    assert re.search(r"3/3.* - val_accuracy: [\d.e+-]+ - val_loss: [\d.e+-]+ *\n", printed)
    assert re.search(r"^test: loss \d\.\d{4}, accuracy \d\.\d{4}$", printed, re.MULTILINE)
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_preset_of_keras_hub_is_what_the_training_begins_with(tmp_path: Path):
    for split, rows in {"train": 9, "valid": 4, "test": 4}.items():
        (tmp_path / f"wiki.{split}.tokens").write_text("\n".join([" ".join(["one"] * 40)] * rows))
    preset, program = tmp_path / "preset", str(FOLDER / "masked_lm.py")
    run_with_keras_hub(
        str(Path(__file__).parent / "programs" / "keras_hub_preset.py"), program, str(preset), folder=tmp_path
    )

    # So small a rate moves nothing: the numbers are those of the weights that were read.
    words = ("--preset", str(preset), "--batch-size", "8", "--epochs", "1", "--learning-rate", "1e-30")
    printed = run_with_keras_hub(
        program, "--data", str(tmp_path), *words, "--sequence-length", "24", "--log-dir", "logs", folder=tmp_path
    )

    assert "Number of devices: 4" in printed
    assert re.search(r"2/2.* - val_accuracy: 1\.0000 - val_loss: [\d.e+-]+ *\n", printed)
    assert "\ntest: loss 0.0000, accuracy 1.0000\n" in printed


@pytest.mark.timeout(LIMIT_S + 30)
def test_keras_hub_on_four_devices_has_the_numbers_of_one(tmp_path: Path):
    program = Path(__file__).parent / "programs" / "keras_hub_masks.py"
    found = json.loads(run_with_keras_hub(str(program), str(FOLDER / "masked_lm.py"), folder=tmp_path))
    assert {4, 5} <= {*found["rows"]}  # 18 rows are 5, 5, 4 and 4
    assert found["moved"] > 1e-3
    assert found["weights"] < 1e-6
    assert found["history"] < 1e-5
