"""The programs of ``examples``, run as a user runs them: they learn, and on several devices as on one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
LIMIT_S = 250

Started = subprocess.Popen[str]
Run = Callable[..., str]


def finish(process: Started, code: int = 0) -> str:
    printed, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, errors
    return printed


@pytest.fixture
def run(python: Callable[..., Started]) -> Run:
    """``run("01", "--epochs", "2")``: what that program prints. Each process computes on one core."""

    def start(number: str, *words: str) -> str:
        (path,) = EXAMPLES.glob(f"{number}_*.py")
        return finish(python(str(path), *words, OMP_NUM_THREADS="1"))

    return start


def results(printed: str) -> list[float]:
    """The losses, accuracies and other numbers that a program prints itself, without the lines of ``fit``."""
    lines = [line for line in printed.splitlines() if " ms/step" not in line]
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def accuracy_and_chance(printed: str) -> tuple[float, float]:
    found = re.findall(r"accuracy ([\d.]+) \(chance: ([\d.]+)\)", printed)[-1]
    return float(found[0]), float(found[1])


@pytest.mark.parametrize(
    ("number", "words", "tolerance"),
    [
        ("01", ["--epochs", "3"], 1e-3),
        ("03", ["--epochs", "1", "--dropout", "0"], 1e-2),
        ("04", ["--epochs", "1"], 1e-3),
        ("05", ["--epochs", "1"], 1e-2),
        ("06", ["--epochs", "2", "--batch-size", "200"], 1e-2),
        ("08", ["--epochs", "1", "--pretrain-epochs", "1", "--precision", "fp32"], 1e-2),
    ],
    ids=["quick_start", "bert", "own_loop", "dcgan", "contrastive", "lora"],
)
def test_three_devices_print_the_numbers_of_one(run: Run, number: str, words: Sequence[str], tolerance: float):
    one, three = (run(number, *words, "--devices", devices) for devices in ("cpu:1", "cpu:3"))

    assert results(one)
    assert results(three) == pytest.approx(results(one), rel=tolerance, abs=tolerance)


def test_a_classifier_and_a_loop_learn(run: Run):
    for number in ("01", "04"):
        accuracy, chance = accuracy_and_chance(run(number))

        assert accuracy > 0.85 > chance, number


def test_the_programs_stand_alone_and_are_short():
    texts = {path.name: path.read_text() for path in PROGRAMS}

    assert {name: len(text.splitlines()) for name, text in texts.items() if text.count("\n") > 120} == {}
    assert [text for text in texts.values() if re.search(r"(from|import) lockstep\.", text)] == []


def test_a_wrong_device_ends_in_one_line(python: Callable[..., Started]):
    process = python(str(EXAMPLES / "01_quick_start.py"), "--devices", "gpu:99")
    _, errors = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert "gpu:99" in errors.splitlines()[-1]
    assert "Traceback" not in errors
