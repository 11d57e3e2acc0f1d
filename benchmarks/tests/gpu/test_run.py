"""The command: honest where there is no GPU, whole where the programs are tried on the CPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import NOTHING_TO_RUN, main
from benchmarks.gpu.device import DeviceFacts
from benchmarks.gpu.gpu_tests import FIRST, MARK, GpuTests, command, files_with_gpu_tests, run_gpu_tests
from benchmarks.gpu.suite import device_facts, reason_not_to_run

TESTS = Path(__file__).parents[3] / "tests"
ROOT = TESTS.parent
# What a machine with a GPU need not have beside torch; setting a name to None in sys.modules makes its import fail.
ABSENT = (
    "accelerate", "datasets", "lightning", "lightning_fabric", "matplotlib", "numpy", "peft", "pandas", "PIL",
    "psutil", "safetensors", "sklearn", "snownlp", "tensorboard", "tokenizers", "torchmetrics",
    "tqdm", "transformers", "typer", "yaml",
)  # fmt: skip
HIDE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"

needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


@needs_none
def test_without_a_gpu_it_says_so_in_one_line_and_is_no_success(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert main(["gpu", "--tests", str(TESTS), "--output", str(tmp_path)]) == NOTHING_TO_RUN == 77

    (line,) = caplog.messages
    assert line.startswith("no CUDA GPU here: torch ")
    assert line.endswith("; nothing was run, no table was written")
    assert list(tmp_path.iterdir()) == []


def test_the_reason_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reason_not_to_run().endswith("is built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert reason_not_to_run().endswith("sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason_not_to_run() == ""
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert reason_not_to_run() == "torch 2.9.1+cu128 is older than 2.11, which this package needs"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "tpu"], "--only tpu is unknown; choose from 'lockstep-1', 'eager', 'lockstep-4', 'ddp-4'"),
        (["--budget-s", "5"], "budget_s=5 was given, expected at least 60"),
        (["--rounds", "0"], "rounds=0 was given"),
    ],
)
def test_bad_words_are_one_line(words: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert main(["gpu", "--device", "cpu", *words, "--output", str(tmp_path)]) == 1

    (line,) = caplog.messages
    assert line.startswith(f"error: {message}")
    assert list(tmp_path.iterdir()) == []


def broken() -> DeviceFacts:
    raise ValueError("the device fell off")


@pytest.mark.workers
def test_a_device_whose_rates_cannot_be_measured_has_a_name(caplog: pytest.LogCaptureFixture):
    assert device_facts("cpu", broken).text.endswith("its rates were not measured")
    assert "ValueError: the device fell off" in caplog.text


@pytest.mark.slow
@pytest.mark.workers
def test_the_programs_can_be_tried_without_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    words = ["gpu", "--device", "cpu", "--workload", "mlm", "--only", "eager", "--rounds", "1"]
    words += ["--warm-up", "1", "--steps", "1", "--output", str(tmp_path)]

    assert main(words) == 0

    (table,) = tmp_path.glob("*-gpu-programs-tried-on-a-cpu.md")
    text = table.read_text()
    assert "no figure of a GPU" in text.splitlines()[0]
    assert text.count("| eager |") == 2
    assert "GFLOP, at least " in text
    record = json.loads(table.with_suffix(".json").read_text())
    assert [sample["workload"] for sample in record["samples"]] == ["mlm-bf16", "mlm-fp32"]
    assert record["comparisons"] == []
    assert caplog.messages[-1] == f"written to {table}"


@pytest.mark.slow
@pytest.mark.workers
def test_what_was_measured_is_there_when_the_run_is_killed(python: Callable[..., Any], tmp_path: Path):
    words = ["gpu", "--device", "cpu", "--workload", "mlm", "--only", "eager", "--warm-up", "1", "--steps", "1"]
    output = ("--rounds", "1000", "--output", str(tmp_path / "tables"))
    bench = python("-m", "benchmarks", *words, *output, folder=ROOT)
    while "round 2 " not in (line := bench.stderr.readline()):
        assert line
    bench.kill()
    bench.wait()

    (table,) = (tmp_path / "tables").glob("*.md")
    assert "| eager |" in table.read_text()
    assert json.loads(table.with_suffix(".json").read_text())["samples"]


def test_the_benchmark_needs_torch_alone():
    code = f"{HIDE}; from benchmarks.__main__ import main; sys.exit(main(['gpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == NOTHING_TO_RUN or torch.cuda.is_available(), done.stderr


def test_the_tests_for_a_gpu_are_collected_with_torch_and_pytest_alone(tmp_path: Path):
    """None of them may import, in its module, what a machine with a GPU need not have; nor may pytest need a plugin."""
    files = files_with_gpu_tests(TESTS)
    assert tuple(file.name for file in files[: len(FIRST)]) == FIRST
    _, _, _, *words = command(TESTS, files[0], tmp_path / "lines")
    words += [*map(str, files[1:]), "--collect-only"]
    code = f"{HIDE}; import pytest; sys.exit(pytest.main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_four_shares_train_as_one_device" in done.stdout


def test_a_python_without_pytest_runs_no_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.gpu.gpu_tests.find_spec", lambda name: None)

    found = run_gpu_tests(TESTS, limit_s=1, file_limit_s=1)
    assert (found.ok, found.failures) == (False, ("not run: this Python has no pytest",))


def run_files(folder: Path, *, limit_s: float = 120.0, file_limit_s: float = 120.0, **files: str) -> GpuTests:
    """Runs tests that are written to ``folder``: by the name of a file the functions in it."""
    for name, functions in files.items():
        head = f"import os, pytest, signal\npytestmark = pytest.{MARK}\n"
        (folder / f"test_{name}.py").write_text(head + functions)
    (folder / "gpu.ini").write_text((TESTS / "gpu.ini").read_text())
    return run_gpu_tests(folder, limit_s=limit_s, file_limit_s=file_limit_s)


@pytest.mark.workers
def test_what_each_test_has_come_to_and_seen_is_told(tmp_path: Path):
    functions = (
        "def test_sees(record_property): record_property('waits (limit 0)', 0)\n"
        "def test_fails(record_property): record_property('waits (limit 0)', 2); assert 1 == 2\n"
        "def test_is_left_out(): pytest.skip('needs two GPUs')\n"
    )
    found = run_files(tmp_path, one=functions)

    told = {test.name.partition("::")[2]: (test.outcome, test.seen) for test in found.ran}
    assert told["test_sees"] == ("passed", "waits (limit 0): 0")
    assert told["test_fails"] == ("failed", "waits (limit 0): 2; assert 1 == 2")
    assert told["test_is_left_out"] == ("skipped", "Skipped: needs two GPUs")
    assert (found.ok, found.text) == (False, "1 passed, 1 failed, 1 skipped")
    assert "needs two GPUs" in found.table


@pytest.mark.workers
@pytest.mark.parametrize(
    ("body", "limits", "why"),
    [
        ("os.abort()", {}, "pytest ended with -6"),
        ("signal.pause()", {"file_limit_s": 5.0}, "ended after 5 s"),
    ],
)
def test_a_file_that_crashes_or_hangs_ends_no_other(body: str, limits: dict[str, float], why: str, tmp_path: Path):
    bad = f"def test_first(): pass\ndef test_bad(): {body}\ndef test_after(): pass\n"
    found = run_files(tmp_path, a=bad, b="def test_other(): pass\n", **limits)

    outcomes = {test.name.partition("::")[2]: test.outcome for test in found.ran}
    assert outcomes["test_first"] == outcomes["test_other"] == "passed"
    assert outcomes["test_bad"] in ("did not end", "failed")  # pytest itself ends one that hangs
    assert "test_after" not in outcomes
    assert list(found.failures) == [f"test_a.py: {why}"]
    assert not found.ok


@pytest.mark.workers
def test_files_without_time_left_are_named(tmp_path: Path):
    found = run_files(tmp_path, limit_s=0.0, a="def test(): pass\n")

    assert (found.ok, list(found.failures)) == (False, ["test_a.py: no time was left"])
