from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lockstep.bench.__main__ import main


def test_one_command_measures_and_writes_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    words = ["--workload", "linear", "--only", "single", "--rounds", "1", "--steps", "2", "--warm-up", "1"]

    assert main([*words, "--output", str(tmp_path)]) == 0

    (table,) = tmp_path.glob("*.md")
    assert "| single |" in table.read_text()
    assert f"command: `python -m lockstep.bench {' '.join(words)}" in table.read_text()
    assert caplog.messages[0].startswith("  1/1  round 1  linear       single")
    assert caplog.messages[-1] == f"\nwritten to {table}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--only", "tpu"],
            "--only tpu names no contender; choose from 'lockstep-2', 'lockstep-4', 'single channels_last'",
        ),
        (["--rounds", "0"], "rounds=0 was given, expected at least 1"),
        (["--steps", "0"], "steps=0 was given, expected at least 1"),
    ],
)
def test_bad_words_are_one_line_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert main([*words, "--output", str(tmp_path)]) == 1

    (line,) = caplog.messages
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []
