"""``lockstep train images`` in real processes: what it prints and leaves, what it refuses, and Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

PROGRAMS = Path(__file__).parent / "programs"

SETTINGS = {
    "--data": "pictures",
    "--output": "out",
    "--size": "8",
    "--output-stride": "8",
    "--width-multiplier": "0.1",
    "--batch-size": "8",
    "--workers": "1",
}
SMALL = [word for pair in SETTINGS.items() for word in pair]
HEADER = ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "seconds", "ms/step", "examples/s"]


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path) -> Path:
    """train/ and test/ of two classes: 40 and 4 pictures."""
    folder = tmp_path / "pictures"
    for part, number in {"train": 20, "test": 2}.items():
        for shade, of_class in enumerate(("cat", "dog")):
            (folder / part / of_class).mkdir(parents=True)
            for n in range(number):
                Image.new("RGB", (9, 7), (200 * shade, 10 * n, 0)).save(folder / part / of_class / f"{n}.png")
    return folder


def test_a_run_prints_devices_epochs_and_result_and_leaves_its_files(run_lockstep, check_results, tmp_path: Path):
    (tmp_path / "pictures" / "train" / "cat" / "7.png").write_bytes(b"")
    shutil.copy(tmp_path / "pictures" / "train" / "cat" / "8.png", tmp_path / "pictures" / "train" / "loose.png")

    done = run_lockstep("train", "images", *SMALL, "--devices", "cpu:3", "--epochs", "2", "--check-exact")

    assert done.returncode == 0
    skipped = "lockstep: warning: 1 of 44 images cannot be read, such as 'pictures/train/cat/7.png' ("
    assert [line.startswith(skipped) for line in done.stderr.splitlines()] == [True]
    printed = [line.split() for line in done.stdout.splitlines()]
    assert printed[0][:5] == ["MobileNetV2", "on", "3", "logical", "devices:"]
    assert ["cpu:2", "cpu:0", "1", "of", "3"] in printed
    assert [row[0] for row in printed[printed.index(HEADER) + 2 :][:2]] == ["1", "2"]
    assert [row[0] for row in printed[printed.index(HEADER) + 5 :] if row][:7] == [
        "data",
        "best",
        "updates",
        "test",
        "model",
        "logs",
        "curves",
    ]
    (data,) = (line for line in done.stdout.splitlines() if line.startswith("data"))
    assert "train 35, valid 4, test 4 images; 1 broken image skipped, listed in out/skipped.txt;" in data
    assert data.endswith("; 1 image beside the class folders left out")
    assert done.stdout.count("fingerprint ") == 1
    assert "3 replicas against one device in plain PyTorch" in done.stdout
    (listed,) = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert listed.startswith("pictures/train/cat/7.png\t")

    predict = ("predict", "out", "pictures/test", "pictures/train/cat/7.png", "--devices", "cpu:2", "--output", "new")
    predicted, again = run_lockstep(*predict), run_lockstep(*predict)

    assert (predicted.returncode, predicted.stderr) == (0, "")
    assert "not read: pictures/train/cat/7.png (" in predicted.stdout
    header, *rows = (tmp_path / "new" / "predictions.csv").read_text().splitlines()
    assert header.startswith("file,class,probability,error,cat,")
    assert len(rows) == 5
    assert (tmp_path / "new" / "contact-sheet.png").read_bytes().startswith(b"\x89PNG")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "or --overwrite to replace them" in again.stderr
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (tmp_path / "out" / "model").iterdir()} == {
        "model.safetensors",
        "config.json",
        "preprocessor_config.json",
        "README.md",
    }
    assert list((tmp_path / "out" / "logs").rglob("events.out.tfevents*"))
    assert re.match("{'label': '(cat|dog)'", check_results(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "many"], "Invalid value for '--size'"),
        (["--size", "7"], "size=7 was given, expected at least 8"),
        (["--data", "nowhere"], "the image folder 'nowhere' does not exist"),
        (["--data", "pictures/test/cat/0.png"], "the image folder 'pictures/test/cat/0.png' does not exist or is"),
        (["--data", "pictures/test/cat"], "has these classes and images: none"),
        (["--output", "pictures/test/cat/0.png"], "is a file, expected a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(words, said, run_lockstep, tmp_path: Path):
    done = run_lockstep("train", "images", *SMALL, "--width-multiplier", "1", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("lockstep: error: ")
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def empty_a_class(pictures: Path) -> None:
    for path in (pictures / "train" / "dog").iterdir():
        path.unlink()


def leave_one_class(pictures: Path) -> None:
    for part in ("train", "test"):
        shutil.rmtree(pictures / part / "dog")


def leave_nothing(pictures: Path) -> None:
    for path in pictures.rglob("*.png"):
        path.unlink()


def add_a_class_to_the_test(pictures: Path) -> None:
    (pictures / "test" / "cat").rename(pictures / "test" / "cow")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (empty_a_class, "cat: 20, dog: 0"),
        (leave_one_class, "cat: 2"),
        (leave_nothing, "cat: 0, dog: 0"),
        (add_a_class_to_the_test, "cow: 2, dog: 2; expected at least two folders, the same ones in every split"),
    ],
)
def test_pictures_that_cannot_be_used_are_one_line(damage, said, pictures: Path, run_lockstep, tmp_path: Path):
    damage(pictures)
    done = run_lockstep("train", "images", *SMALL)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_too_many_broken_pictures_are_one_line_and_all_are_listed(pictures: Path, run_lockstep, tmp_path: Path):
    broken = sorted(pictures.rglob("1*.png"))
    for path in broken:
        path.write_bytes(b"broken")

    done = run_lockstep("train", "images", *SMALL)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "24 of 44 images cannot be read, such as 'pictures/train/cat/1.png' (cannot identify" in done.stderr
    assert "these are 54.5%, expected at most 5%; repair or remove those that 'out/skipped.txt' lists" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["skipped.txt"]
    lines = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert sorted(line.partition("\tcannot identify")[0] for line in lines) == [
        str(path.relative_to(tmp_path)) for path in broken
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_one_line(pictures: Path, run_lockstep):
    (pictures / "train" / "dog").chmod(0)
    done = run_lockstep("train", "images", *SMALL)
    (pictures / "train" / "dog").chmod(0o755)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cat: 20, dog: 0" in done.stderr


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_one_step(run_lockstep):
    done = run_lockstep("train", "images", *SMALL, "--batch-size", "5000", "--epochs", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 step" in done.stdout


@pytest.mark.slow
def test_a_quiet_run_prints_the_result_alone(run_lockstep):
    done = run_lockstep("train", "images", *SMALL, "--epochs", "1", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == HEADER
    words = [line.split()[0] for line in lines[3:] if line]
    assert words == ["data", "best", "updates", "test", "model", "logs", "curves", "numbers", "fingerprint"]
    assert lines[2].split()[0] == "1"
    assert re.fullmatch("fingerprint [0-9a-f]{16}", lines[-1])


@pytest.mark.slow
def test_a_batch_size_is_found_and_a_later_run_has_the_same(run_lockstep, check_batch_size):
    words = ("train", "images", *SMALL, "--batch-size", "auto", "--memory-limit", "4000", "--epochs", "1")
    first, second = (run_lockstep(*words, "--devices", "cpu:2", *more) for more in ([], ["--overwrite"]))
    assert "batches of as many images as trial steps find" in first.stdout
    assert check_batch_size("batch_size", first, second) <= 36  # 40 training images, of which 4 are held out


def ticks(pid: str) -> int:
    """Time that a process has computed, in clock ticks of 10 ms."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.slow
def test_ctrl_c_while_decoding_ends_the_workers_too(pictures: Path, start_lockstep, tmp_path: Path):
    large = pictures / "train" / "dog" / "large.png"
    Image.new("RGB", (4000, 4000)).save(large)
    for n in range(200):  # a tenth of a second each
        os.link(large, large.with_name(f"large{n}.png"))
    process = start_lockstep("train", "images", *SMALL, "--devices", "cpu:2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # Not at the very fork: Python ignores what is raised in its own hooks there, Ctrl-C too.
    while not (workers := [pid for pid in children.read_text().split() if ticks(pid) > 20]):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert (process.returncode, said) == (130, "lockstep: interrupted\n")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.workers
def test_workers_train_together_and_the_chief_alone_prints_and_writes(train_on_two_workers):
    train_on_two_workers("images", *SMALL)


@pytest.mark.slow
def test_the_first_step_does_not_wait_for_packages_that_it_does_not_need(tmp_path: Path):
    words = ("train", "images", "--devices", "cpu:2", "--output", str(tmp_path / "out"))
    # A process of its own: those that other tests start have many packages already.
    done = subprocess.run(
        [sys.executable, PROGRAMS / "first_step.py", *words], capture_output=True, text=True, timeout=250, check=False
    )
    imported = set(done.stdout.partition("IMPORTED ")[2].split())
    assert {"torch", "transformers", "lockstep"} <= imported, done.stderr
    assert not {"sklearn", "torchmetrics", "matplotlib", "pandas"} & imported
