"""``lockstep bench pipeline``: what it prints and leaves, measured in real processes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep_tools.cli import main

pytestmark = pytest.mark.slow

SMALL = (
    "--layers", "4", "--hidden", "32", "--steps", "2", "--rounds", "1",
)  # fmt: skip


@pytest.mark.workers
def test_one_command_measures_prints_and_leaves_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)

    assert main(["bench", "pipeline", *SMALL, "--schedules", "zero_bubble_v", "--output", "out"]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    assert out.startswith("S=2 workers, M=8 microbatches: (S-1)/(M+S-1) = 11.1%\n")
    assert re.search(r"^  1/1  round 1  zero_bubble_v .* ms a step  idle +\d+\.\d%$", out, re.MULTILINE)
    table, picture = (next((tmp_path / "out").glob(f"*.{suffix}")) for suffix in ("md", "svg"))
    assert [line.split()[-1] for line in out.splitlines()[-2:]] == [f"out/{path.name}" for path in (table, picture)]
    row = next(line for line in table.read_text().splitlines() if line.startswith("| zero_bubble_v |"))
    _, stages, _, idle, _, _, with_costs = (cell.strip(" %") for cell in row.strip("|").split("|"))
    assert stages == "2"
    assert 0 < float(with_costs) <= float(idle) + 2  # theory has the same actions, and waits for nothing else


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedules", "fastest"], "--schedules='fastest' is unknown; choose one of 1f1b, gpipe, interleaved"),
        (["--workers", "1"], "workers=1 was given, expected at least 2"),
        (["--layers", "3"], "4 stages, and the model has 3 layers; choose"),
        (["--output", "file"], "'file' is a file, expected a folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    assert main(["bench", "pipeline", *words]) == 2
    out, error = capfd.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "pipeline", "--help"]) == 0
    assert "Example: lockstep bench pipeline" in capsys.readouterr().out
