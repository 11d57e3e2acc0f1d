"""``lockstep bench scaling``: what it prints and leaves, measured in real processes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from lockstep_tools.cli import main

TINY = ("--width-multiplier", "0.1", "--workers", "0", "--warm-up", "1", "--rounds", "1")


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    """A folder of two classes of 20 small pictures each, of which 32 in all are trained on."""
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        folder = tmp_path / "pictures" / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return "pictures"


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.usefixtures("fresh_devices")
def test_one_command_measures_prints_and_leaves_two_files(
    pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    words = ("--data", pictures, "--devices", "cpu:2", "--batch-size", "8", "--steps", "3", "--output", "out")

    assert main(["bench", "scaling", "images", *TINY, *words]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    lines = out.splitlines()
    progress = [line for line in lines if " ms a step " in line]
    assert "round 1  1 device  " in progress[0]
    assert "round 1  2 replicas, same total  " in progress[-2]
    assert "round 1  2 replicas, 2 times the total batch   16" in progress[-1]
    assert sum(line.startswith("2 replicas, same total") for line in lines) == 2
    page, samples = (next((tmp_path / "out").glob(f"*.{suffix}")) for suffix in ("html", "json"))
    assert [line.split()[-1] for line in lines[-2:]] == [f"out/{path.name}" for path in (page, samples)]
    found = json.loads(samples.read_text())["samples"]
    assert [len(each["record"]["step_ms"]) for each in (found[0], found[-1])] == [3, 2]  # of 4 steps, and a whole epoch


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tulips"], "No such command 'tulips'; see lockstep bench scaling --help"),
        (["images", "--devices", "cpu:2", "--replicas", "4"], "4 replicas were asked for, but --devices gives 2"),
        (["images", "--devices", "cpu:2", "--batch-size", "1"], "a total batch of 1 leaves some of 2 replicas without"),
        (["images", "--replicas", "two"], "--replicas 'two' cannot be read"),
        (["images", "--devices", "cpu:1"], "--devices gives 1 logical device, expected at least 2"),
        (["images", "--size", "1"], "size=1"),
        (["images", "--devices", "cpu:2", "--data", "nowhere"], "'nowhere' does not exist"),
        (["mlm", "--output", "file"], "'file' is a file, expected a folder"),
        (["mlm", "--output", "file/below"], "'file' is a file, expected a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("fresh_devices")
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")

    assert main(["bench", "scaling", *words]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("lockstep: error: ")
    assert said in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_template_engine_is_seen_before_anything_is_measured(tmp_path: Path):
    code = "import sys; sys.modules['jinja2'] = None; from lockstep_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "scaling", "images"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'torch-lockstep[plots]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["scaling"], ["scaling", "mlm"]], ids=["bench", "scaling", "mlm"])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", *words, "--help"]) == 0
    assert "Example: lockstep bench scaling" in capsys.readouterr().out
