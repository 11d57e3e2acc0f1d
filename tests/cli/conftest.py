"""The command as a person starts it: a process of its own, in a folder of its own."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

LIMIT_S = 250


@pytest.fixture
def start_lockstep(python: Start) -> Start:
    """``start_lockstep("train", ...)``: starts the command; what is still running at the end of the test is killed."""
    return partial(python, "-m", "lockstep_tools.cli")


@pytest.fixture
def run_lockstep(start_lockstep: Start) -> Run:
    """``run_lockstep("devices", ...)``: runs the command to its end, in a process of its own."""

    def run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        process = start_lockstep(*words, **how)
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture
def train_on_two_workers(run_lockstep: Run, tmp_path: Path) -> Callable[..., None]:
    """``train_on_two_workers("images", "--output", "out")``: both train, and the chief alone prints and writes."""

    def train(*words: str) -> None:
        recipe = ("-m", "lockstep_tools.cli", "train", *words, "--devices", "cpu:1", "--epochs", "1")

        done = run_lockstep("run", "--workers", "2", "--output", "all", "--quiet", *recipe, forks_workers=True)

        assert done.returncode == 0, done.stderr
        assert "[0] 2 workers, 2 replicas: worker 0 (" in done.stdout
        assert [line[:3] for line in done.stdout.splitlines() if "test    loss" in line] == ["[0]"]
        assert not any(line.startswith("[1]") for line in done.stdout.splitlines())
        assert (tmp_path / "out" / "model" / "model.safetensors").is_file()

    return train


@pytest.fixture
def check_batch_size(tmp_path: Path) -> Callable[..., int]:
    """``check_batch_size("batch_size", first, second)``: the global batch that the first run on two replicas has found.

    The second run has taken it from the cache in ``out`` and trained the same. The first argument is the setting.
    """

    def check(setting: str, first: subprocess.CompletedProcess[str], second: subprocess.CompletedProcess[str]) -> int:
        assert (first.returncode, first.stderr, second.returncode, second.stderr) == (0, "", 0, "")
        (one,), (two,) = (
            re.findall(r"batch size (\d+) \((\d+) per replica\)", done.stdout) for done in (first, second)
        )
        assert one == two
        size, per_replica = map(int, one)
        assert size == 2 * per_replica
        assert ", from the cache" not in first.stdout
        assert ", from the cache" in second.stdout
        record = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
        assert record["configuration"][setting] == (per_replica if setting.startswith("per_device") else size)
        fingerprints = {re.search("fingerprint (.*)", done.stdout)[1] for done in (first, second)}
        assert fingerprints == {record["fingerprint"]}
        return size

    return check


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """``write(text)``: a program of that text, where the command runs."""

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return "program.py"

    return write


@pytest.fixture
def check_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """``check_results(stdout)``: ``out`` has the printed numbers; returns what the code of the model card prints."""

    def check(printed: str) -> str:
        record = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
        shown = ", ".join(f"{name} {value:.4f}" for name, value in record["test"].items())
        assert f"test    {shown}" in printed
        assert f"fingerprint {record['fingerprint']}" in printed
        assert record["layout"]["devices"] == [f"cpu:{n}" for n in range(record["layout"]["replicas"])]
        assert {"python", "torch", "lockstep", "transformers"} <= set(record["versions"])
        assert record["peak_memory_mb"]["host"] > 100
        assert record["seconds"]["run"] > sum(epoch["seconds"] for epoch in record["seconds"]["steps"])
        with (tmp_path / "out" / "history.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["epoch"] for row in rows] == [str(n + 1) for n in range(record["epochs"])]
        assert all(f"{float(row['val_loss']):.4f}" in printed for row in rows)
        text = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
        card = pytest.importorskip("huggingface_hub").ModelCard(text).data
        assert {result.metric_type: result.metric_value for result in card.eval_results} == pytest.approx(
            record["test"], abs=1e-4
        )
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        exec(code[1], {})
        return capsys.readouterr().out

    return check
