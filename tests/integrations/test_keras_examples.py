"""The Keras programs of ``examples/keras``: each is the program beside it for one device and a few lines more."""

from __future__ import annotations

import difflib
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("keras")
pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "examples" / "keras"
Run = Callable[..., list[float]]


@pytest.fixture
def run(
    fresh_devices: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[float]]:
    """``run(name, *arguments)``: runs a program; the losses and accuracies that it prints for epochs and tests."""

    def run(name: str, *arguments: str) -> list[float]:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        lines = [line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n")]  # of a bar the last state
        return [float(found) for found in re.findall(r"(?:loss|accuracy):? ([\d.]+(?:e-?\d+)?)", "\n".join(lines))]

    return run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tree of class folders: pictures of noise, brighter from class to class."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0)
    for index in range(14):
        place = folder / "train" / f"{index % 2}" if index < 11 else folder / "test" / f"{index % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = noise.integers(40 + 100 * (index % 2), size=(32, 32, 3), dtype="uint8")
        Image.fromarray(pixels).save(place / f"{index}.png")
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of text, a line of several sentences for each."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0).choice(["one", "two", "three", "device", "devices", "replica", "model"], (27, 30))
    lines = [" ".join(line) for line in words]
    for split, rows in (("train", lines[:19]), ("valid", lines[19:23]), ("test", lines[23:])):
        (folder / f"tiny.{split}.tokens").write_text("\n".join(rows))
    return str(folder)


@pytest.mark.parametrize(("name", "most"), [("digits_loop", 22), ("masked_words", 8), ("mobilenet", 11)])
def test_few_lines_differ_from_the_program_for_one_device(name: str, most: int):
    programs = [(FOLDER / f"{each}.py").read_text() for each in (f"{name}_one_device", name)]
    one, all_devices = (program.partition('"""\n\n')[2].splitlines() for program in programs)
    changed = [line for line in difflib.ndiff(one, all_devices) if line[:1] in "+-" and line[1:].strip()]
    assert 6 <= len(changed) <= most


@pytest.mark.slow
def test_masked_words_has_the_numbers_of_one_device(run: Run, text: str, tmp_path: Path):
    words = ["--data", text, "--vocabulary", "60", "--sequence-length", "24", "--batch-size", "8", "--epochs", "2"]
    one = run("masked_words_one_device", *words, "--dropout", "0", "--log-dir", str(tmp_path))
    three = run("masked_words", *words, "--dropout", "0", "--devices", "cpu:3")
    assert len(one) == 2 * 4 + 2
    assert three == pytest.approx(one, abs=2e-4)
    assert list(tmp_path.glob("events.out.tfevents.*"))


# Of one batch of 11 rows: in float32 the second update of so deep a network differs, because Adam's first is the sign
# of each gradient times the rate, and rounding decides the sign of those near 0.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "batches"), [("digits_loop", (11, 11)), ("mobilenet", (12, 6))])
def test_mobilenet_has_the_numbers_of_one_device(name: str, batches: tuple[int, int], run: Run, pictures: str):
    words = ["--data", pictures, "--epochs", "1", "--batch-size"]
    one = run(f"{name}_one_device", *words, str(batches[0]))
    two = run(name, *words, str(batches[1]), "--devices", "cpu:2")
    assert len(one) >= 3
    assert two[:2] == pytest.approx(one[:2], abs=1e-4)
    assert two[2:] == pytest.approx(one[2:], rel=0.02)
