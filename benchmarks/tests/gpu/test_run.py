"""The command: honest where there is no GPU, whole where the programs are tried on the CPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NOTHING_TO_RUN, main
from benchmarks.gpu.gpu_tests import MARK, SuiteOutcome, command, files_with_gpu_tests, last_done, outcome_of, run_suite
from benchmarks.gpu.roofline import DeviceFacts
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


def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch):
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
        (["--workload", "linear"], "--workload linear is not run on a GPU; choose mlm or mobilenetv2"),
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
def test_a_device_whose_rates_cannot_be_measured_has_a_name_and_a_reason():
    facts = device_facts("cpu", broken)

    assert facts.name
    assert "ValueError: the device fell off" in facts.trouble


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
    assert "The roofline of a step: " in text
    record = json.loads(table.with_suffix(".json").read_text())
    assert [sample["workload"] for sample in record["samples"]] == ["mlm-bf16", "mlm-fp32"]
    assert {each["verdict"] for each in record["comparisons"]} == {"not measured"}
    assert caplog.messages[0].startswith("budget 600 s: tests at most 240")
    assert caplog.messages[-1] == f"written to {table}"


def test_the_benchmark_needs_torch_alone():
    code = f"{HIDE}; from benchmarks.__main__ import main; sys.exit(main(['gpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == NOTHING_TO_RUN or torch.cuda.is_available(), done.stderr


def test_the_tests_for_a_gpu_are_collected_with_torch_and_pytest_alone(tmp_path: Path):
    """None of them may import, in its module, what a machine with a GPU need not have; nor may pytest need a plugin."""
    files = files_with_gpu_tests(TESTS)
    assert TESTS / "strategies" / "test_mirrored_gpu.py" in files
    _, _, *words = command(TESTS, files, tmp_path / "report.xml")
    code = f"{HIDE}; import pytest; sys.exit(pytest.main({[*words[1:], '--collect-only']!r}))"
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


@needs_none
@pytest.mark.slow
def test_the_suite_counts_what_was_skipped_as_no_success(capfd: pytest.CaptureFixture[str]):
    outcome = run_suite(TESTS, limit_s=170)

    assert (outcome.passed, outcome.failed, outcome.trouble) == (0, (), "")
    assert outcome.skipped > 10
    assert not outcome.ok
    assert "needs a GPU" in capfd.readouterr().out


REPORT = """<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">
<testcase classname="tests.a" name="test_one"/><testcase classname="tests.a" name="test_two"><skipped/></testcase>
<testcase classname="tests.b" name="test_three"><failure message="x">x</failure></testcase>
<testcase/>
</testsuite></testsuites>"""


def test_an_outcome_is_read_from_the_report():
    outcome = outcome_of(REPORT, 12.3)

    assert outcome == SuiteOutcome(passed=1, skipped=1, failed=("tests.b::test_three",), seconds=12.3)
    assert (outcome.ok, outcome.text) == (False, "1 passed, 1 failed, 1 skipped in 12 s")
    assert last_done(REPORT) == "tests.b::test_three"
    assert SuiteOutcome(passed=1).ok
    assert not SuiteOutcome().ok


def test_a_python_without_pytest_runs_no_tests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.gpu.gpu_tests.find_spec", lambda name: None)
    outcome = run_suite(TESTS, limit_s=1)

    assert (outcome.text, outcome.ok) == ("not run: this Python has no pytest", False)


@pytest.mark.workers
def test_tests_that_take_too_long_are_ended(tmp_path: Path):
    stuck = f"import pytest, signal\npytestmark = pytest.{MARK}\ndef test_good(): pass\ndef test(): signal.pause()\n"
    (tmp_path / "test_stuck.py").write_text(stuck)
    (tmp_path / "gpu.ini").write_text((TESTS / "gpu.ini").read_text())
    outcome = run_suite(tmp_path, limit_s=4.0)

    assert outcome.trouble.startswith("ended after 4 s")  # on a slow machine before there was a report
    assert outcome.passed <= 1
    assert not outcome.ok
