"""The two example programs: on 1 to 4 replicas the loop is the plain one, step by step; and how they look and end."""

from __future__ import annotations

import runpy
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from lockstep.config import DeviceRegistry
from lockstep.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = {"train": 11, "test": 7}
# Batches of 8 and 3 rows: four replicas get 1, 1, 1 and 0 of the last.
WORDS = ["--size", "32", "--batch-size", "8", "--epochs", "2", "--float64"]
# In double precision what is left is the order of additions: 4e-16 after the first step, and four updates of Adam and
# batch norms over three rows make 1e-8 of it. A mean over the shards is off by more than 1e-2.
EXACT = 1e-6

Started = subprocess.Popen[str]
Outcome = tuple[list[tuple[float, float]], torch.nn.Module]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of class folders: pictures of noise, brighter from class to class."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = torch.Generator().manual_seed(0)
    for part, number in PICTURES.items():
        for index in range(number):
            place = folder / part / f"class {index % 3}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(40 + 80 * (index % 3), (32, 32, 3), generator=noise, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(place / f"{index}.png")
    return folder


def main_of(name: str) -> Callable[[list[str]], Outcome]:
    main: Callable[[list[str]], Outcome] = runpy.run_path(str(EXAMPLES / name))["main"]
    return main


@pytest.fixture(scope="module")
def plain(pictures: Path) -> Outcome:
    cores = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a batch is slower on two
    try:
        return main_of("plain_loop.py")(["--device", "cpu", "--data", str(pictures), *WORDS])
    finally:
        torch.set_num_threads(cores)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_the_loop_on_replicas_is_the_plain_one_step_by_step(
    replicas: int, plain: Outcome, pictures: Path, fresh_devices: DeviceRegistry
):
    steps, module = main_of("custom_loop.py")(["--devices", f"cpu:{replicas}", "--data", str(pictures), *WORDS])

    expected_steps, expected = plain
    assert len(steps) == 4
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in expected_steps], rel=EXACT)
    assert [right for _, right in steps] == [right for _, right in expected_steps]
    assert len({loss for loss, _ in steps}) == 4  # it trains
    for (name, ours), theirs in zip(module.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT, msg=lambda said, name=name: f"{name}: {said}")


def test_the_programs_stand_side_by_side():
    """The difference is the lesson, so there must not be much of it: a third of the lines at the most."""
    plain, custom = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_loop.py", "custom_loop.py"))

    assert abs(len(custom) - len(plain)) <= 8
    assert len(set(custom) - set(plain)) <= len(custom) / 4
    assert max(len(plain), len(custom)) <= 120


@pytest.fixture
def start(python: Callable[..., Started], pictures: Path) -> Callable[..., Started]:
    """``start("--epochs", "1")``: the program on those pictures."""
    given = ("--devices", "cpu:2", "--data", str(pictures), "--batch-size", "8")
    return partial(python, str(EXAMPLES / "custom_loop.py"), *given, OMP_NUM_THREADS="1")


def test_a_run_in_a_pipe_prints_a_line_for_each_epoch_and_the_test(start: Callable[..., Started]):
    process = start("--epochs", "2")
    printed, rest = process.communicate(timeout=250)

    assert (process.returncode, rest) == (0, "")  # no bar in a pipe
    first, second, test = printed.splitlines()
    assert first.startswith("epoch 1: loss ")
    assert second.startswith("epoch 2: loss ")
    assert test.startswith("test: loss ")
    assert test.endswith("(7 images)")


def test_ctrl_c_ends_in_one_word(start: Callable[..., Started]):
    process = start("--epochs", "1000")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch 1: ")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)

    assert process.returncode == 1
    assert rest.splitlines()[-1].strip().endswith("interrupted")
    assert "Traceback" not in rest


def test_an_unknown_device_is_named(fresh_devices: DeviceRegistry):
    with pytest.raises(ConfigError, match="gpu:99"):
        main_of("custom_loop.py")(["--devices", "gpu:99"])
