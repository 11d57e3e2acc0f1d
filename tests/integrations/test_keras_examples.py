"""The Keras programs of ``examples/keras``: each is the program beside it for one device and a few lines more."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("keras")

FOLDER = Path(__file__).parents[2] / "examples" / "keras"
NAMES = ("digits_loop", "masked_words", "mobilenet")
LIMIT_S = 240
ON_TWO_DEVICES = """
import runpy, sys
import lockstep as ls

(cpu,) = ls.config.list_physical_devices("CPU")
ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_differ_from_the_program_for_one_device(name: str):
    programs = [(FOLDER / f"{each}.py").read_text() for each in (f"{name}_one_device", name)]
    one, all_devices = (program.partition('"""\n\n')[2].splitlines() for program in programs)

    changed = [line for line in difflib.ndiff(one, all_devices) if line[:1] in "+-" and line[1:].strip()]

    assert 3 <= len(changed) <= 5


def run(python: Callable[..., Any], *words: str) -> list[str]:
    done = python(*words, KERAS_BACKEND="torch", OMP_NUM_THREADS="1")
    printed, said = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, said
    return re.findall(r"(?:loss|accuracy):? [\d.]+", printed)


def test_the_loop_prints_the_numbers_of_one_device(python: Callable[..., Any]):
    one = run(python, str(FOLDER / "digits_loop_one_device.py"), "--epochs", "2")

    two = run(python, "-c", ON_TWO_DEVICES, str(FOLDER / "digits_loop.py"), "--epochs", "2")

    assert len(one) == 4
    assert two == one


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "arguments"), [("masked_words", ["--rows", "200"]), ("mobilenet", ["--rows", "90"])])
def test_the_others_run(name: str, arguments: list[str], python: Callable[..., Any]):
    found = run(python, "-c", ON_TWO_DEVICES, str(FOLDER / f"{name}.py"), "--epochs", "1", *arguments)

    assert len(found) >= 2
