"""The programs of ``examples``, run as a user runs them: they learn, and on several devices as on one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.conftest import FreePorts

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
# Where there is no timm, or no torchvision that goes with this torch, small modules of these names take their place.
STAND_IN = [] if find_spec("timm") and find_spec("torchvision") else [str(Path(__file__).parent / "stand_in")]
LIMIT_S = 250
START = "import runpy, sys; sys.path += {paths}; sys.argv = {words}; runpy.run_path(sys.argv[0], run_name='__main__')"

Started = subprocess.Popen[str]
Start = Callable[..., Started]
Run = Callable[..., str]


@pytest.fixture
def start(python: Start) -> Start:
    """``start("01", "--epochs", "2")``: begins that program. Each process computes on one core."""

    def begin(number: str, *words: str, **variables: str) -> Started:
        (path,) = EXAMPLES.glob(f"{number}_*.py")
        code = START.format(paths=STAND_IN if number == "02" else [], words=[str(path), *words])
        return python("-c", code, **{"OMP_NUM_THREADS": "1", **variables})

    return begin


@pytest.fixture
def run(start: Start) -> Run:
    """``run("01", "--epochs", "2")``: what that program prints."""
    return lambda number, *words: finish(start(number, *words))


def finish(process: Started, code: int = 0) -> str:
    printed, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, errors
    return printed


def results(printed: str) -> list[float]:
    """The losses, accuracies and other numbers that a program prints itself, without the lines of ``fit``."""
    lines = [line for line in printed.splitlines() if " ms/step" not in line]
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def fingerprint(printed: str) -> str:
    return re.findall(r"^fingerprint (\w{16})$", printed, re.MULTILINE)[-1]


def on_one_and_three(run: Run, number: str, *words: str, tolerance: float) -> list[float]:
    """The numbers of three devices, which have to be those of one."""
    one, three = (results(run(number, *words, "--devices", devices)) for devices in ("cpu:1", "cpu:3"))

    assert one
    assert three == pytest.approx(one, rel=tolerance, abs=tolerance)
    return three


def test_a_loop_of_its_own_prints_the_numbers_of_one_device_and_learns(run: Run):
    *_, accuracy, chance = on_one_and_three(run, "04", "--epochs", "1", tolerance=1e-3)
    assert accuracy > 0.7 > 0.2 > chance


# The tolerances are for float32: an update of Adam depends on the sign of a gradient near 0, and batch norm over few
# rows and a GAN make more of that.


@pytest.mark.slow
def test_fit_prints_the_numbers_of_one_device_and_learns(run: Run):
    *_, accuracy, chance = on_one_and_three(run, "01", "--epochs", "3", tolerance=1e-3)[:5]
    assert accuracy > 0.6 > 0.2 > chance


@pytest.mark.slow
def test_bert_prints_the_numbers_of_one_device_and_learns(run: Run):
    _, accuracy, chance = on_one_and_three(run, "03", "--epochs", "2", "--dropout", "0", tolerance=1e-2)
    assert accuracy > 0.45 > 0.3 > chance


@pytest.mark.slow
def test_a_gan_prints_the_numbers_of_one_device_and_comes_near_to_real_images(run: Run):
    _, untrained, *_, trained = on_one_and_three(run, "05", "--epochs", "2", tolerance=2e-2)[:5]
    assert trained < 0.8 * untrained


@pytest.mark.slow
def test_a_contrastive_loss_prints_the_numbers_of_one_device_and_finds_pairs(run: Run):
    untrained, *_, found = on_one_and_three(run, "06", "--epochs", "5", "--batch-size", "200", tolerance=1e-2)
    assert untrained < 0.1 < 0.3 < found


@pytest.mark.slow
def test_adapters_print_the_numbers_of_one_device_and_learn(run: Run):
    words = ("--epochs", "1", "--pretrain-epochs", "1", "--precision", "fp32")
    share, *_, before, after, chance = on_one_and_three(run, "08", *words, tolerance=1e-2)
    assert share < 5  # percent of the parameters
    assert after < before - 0.05 < chance


@pytest.mark.slow
def test_folders_of_images_give_the_numbers_of_one_device(run: Run):
    words = ("--epochs", "1", "--precision", "fp32", "--batch-size", "100")
    assert on_one_and_three(run, "02", *words, tolerance=2e-2)


@pytest.mark.slow
def test_folders_of_images_are_learnt_in_bf16(run: Run):
    _, accuracy, chance = results(run("02"))
    assert accuracy > 0.7 > 0.2 > chance


@pytest.mark.slow
def test_an_interrupted_training_ends_with_the_bits_of_one_that_was_not(start: Start, run: Run, tmp_path: Path):
    words = ("07", "--epochs", "12", "--patience", "12")
    whole = run(*words, "--output", "whole")
    process = start(*words, "--output", "cut")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch 1/12")
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    resumed = run(*words, "--output", "cut")

    assert "epoch 1/12" not in resumed
    assert results(whole)[-1] > 0.7  # the accuracy of the best weights
    assert fingerprint(resumed) == fingerprint(whole)
    assert results(resumed)[-5:] == results(whole)[-5:]
    ours, theirs = (load_file(tmp_path / folder / "best.safetensors") for folder in ("cut", "whole"))
    assert {name: value.tolist() for name, value in ours.items()} == {n: v.tolist() for n, v in theirs.items()}
    assert [line.split(",")[0] for line in (tmp_path / "cut" / "log.csv").read_text().splitlines()[1:]] == [
        str(epoch) for epoch in range(12)
    ]


@pytest.mark.slow
def test_two_workers_of_tf_config_print_the_numbers_of_one(start: Start, run: Run, free_ports: FreePorts):
    words = ("09", "--dropout", "0", "--epochs", "3")
    alone = run(*words, "--backup", "alone")
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}) for index in (0, 1)]
    chief, other = [start(*words, "--backup", "two", TF_CONFIG=task) for task in tasks]
    printed = finish(chief)

    assert finish(other) == ""
    assert "workers: 2, replicas: 2" in printed
    assert results(printed) == pytest.approx(results(alone), rel=1e-3)
    assert results(printed)[1] > 0.5 > results(printed)[2]  # accuracy, chance


@pytest.mark.slow
def test_a_gpt2_in_eight_parts_learns_as_in_one(run: Run):
    one, eight = (run("10", "--epochs", "2", *words) for words in (("--data=1", "--pipeline=1", "--tensor=1"), ()))
    held, whole = (int(each.replace(",", "")) for each in re.findall(r"has ([\d,]+) of ([\d,]+)", eight)[0])
    assert held < 0.4 * whole
    assert results(eight) == pytest.approx(results(one), rel=1e-3)
    assert results(eight)[1] < results(eight)[0]


def test_the_programs_stand_alone_and_are_short():
    texts = {path.name: path.read_text() for path in PROGRAMS}
    assert len(texts) == 10
    assert {name: text.count("\n") for name, text in texts.items() if text.count("\n") > 120} == {}
    assert [name for name, text in texts.items() if re.search(r"(from|import) lockstep\.", text)] == []


def test_a_wrong_device_ends_in_one_line(start: Start):
    process = start("01", "--devices", "gpu:99")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "gpu:99" in errors.splitlines()[-1]
    assert "Traceback" not in errors
