"""The programs of ``examples/clients`` about batches: three devices print what one prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "clients"
LIMIT_S = 100


def printed(name: str, devices: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), "--devices", devices],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    return done.stdout


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


@pytest.mark.parametrize("name", ["graphs.py", "detection.py"])
def test_a_program_prints_what_it_does_on_one_device(name: str):
    alone, together = (numbers_in(printed(name, devices)) for devices in ("cpu:1", "cpu:3"))
    assert len(alone) == 3 * 4  # the epoch and two losses
    assert together == pytest.approx(alone, abs=2e-4)  # printed to four digits, after 100 updates of Adam
