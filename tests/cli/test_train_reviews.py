"""``lockstep train reviews`` in real processes: what it prints and leaves, what it refuses, and Ctrl-C."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SETTINGS = {
    "--data": "reviews.csv",
    "--output": "out",
    "--vocabulary": "200",
    "--hidden": "16",
    "--feed-forward": "32",
    "--max-tokens": "16",
    "--per-device-train-batch-size": "5",
    "--learning-rate": "0.02",
    "--hide": "0",
}
SMALL = [word for pair in SETTINGS.items() for word in pair]
HEADER = ["epoch", "loss", "val_loss", "val_accuracy", "val_f1", "seconds", "ms/step", "examples/s"]
THINGS = ("房间", "服务", "早餐", "书", "屏幕", "送货", "价格", "质量", "前台", "包装")
WORDS = {1: ("很好", "不错", "满意", "喜欢", "干净"), 0: ("很差", "失望", "糟糕", "难用", "太慢")}


@pytest.fixture(autouse=True)
def reviews(tmp_path: Path) -> Path:
    """100 different reviews, one of them twice, and a row without one."""
    rows = [(label, f"{thing}{word}。") for label in (0, 1) for thing, word in product(THINGS, WORDS[label])]
    path = tmp_path / "reviews.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("label", "review"), *rows, rows[0], (1, "")])
    return path


def tags(folder: Path) -> set[str]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_a_run_prints_data_epochs_result_and_answers_and_leaves_its_files(run_lockstep, check_results, tmp_path: Path):
    asked = ["--text", "书不错。", "--text", "服务很差。"]
    with (tmp_path / "reviews.csv").open("a", encoding="utf-8") as file:
        file.write("1,房间很差。\n0,null\n1,NA\n0,NA\n")
    done = run_lockstep("train", "reviews", *SMALL, *asked, "--devices", "cpu:3", "--epochs", "2")

    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    words = [line.split() for line in printed]
    work = "reviews.csv, 5 reviews per replica and step, 2 epochs, fp32"
    assert printed[0] == f"review classes on 3 logical devices: {work}"
    assert ["cpu:2", "cpu:0", "1", "of", "3"] in words
    missing = "3 missing (NA, null; --keep-na keeps them)"
    dropped = f"106 rows; dropped: 1 empty, {missing}, 1 repeated; 1 review has several labels, and is kept"
    assert f"data reviews.csv: {dropped}" in " ".join(done.stdout.split())
    assert "splits  train 81, valid 10 (chooses the best epoch), test 10" in printed
    assert "labels  0 is 差评！, 1 is 好评！" in printed
    assert [line[:9] for line in printed if line.startswith("epoch ")] == ["epoch 1/2", "epoch 2/2", "epoch    "]
    assert [row[0] for row in words[words.index(HEADER) + 2 :][:2]] == ["1", "2"]
    last = [row[0] for row in words[words.index(HEADER) + 5 :] if row]
    assert last[:6] == ["best", "updates", "test", "model", "logs", "curves"]
    answers = [line for line in printed if line.endswith(("书不错。", "服务很差。"))]
    assert len(answers) == 2
    assert all(re.match(r"(好评！|差评！)  [01]\.\d{3}  ", line) for line in answers)
    (fingerprint,) = [line for line in printed if line.startswith("fingerprint")]
    assert re.fullmatch("fingerprint [0-9a-f]{16}", fingerprint)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "checkpoints",
        "curves.png",
        "history.csv",
        "logs",
        "model",
        "result.json",
    }
    assert re.match("{'label': '(好|差)评！'", check_results(done.stdout))
    (logs,) = (tmp_path / "out" / "logs").iterdir()
    epoch = {f"epoch_{name}" for name in ("loss", "learning_rate", "grad_norm", "step_ms", "examples_per_s")}
    batch = {f"batch_{name}" for name in ("loss", "learning_rate", "grad_norm", "step_ms")}
    assert tags(logs / "train") == epoch | batch
    assert tags(logs / "validation") == {"epoch_loss", "epoch_accuracy", "epoch_f1"}


@pytest.mark.slow
def test_a_model_to_begin_with_gets_adapters_and_leaves_a_plain_model(run_lockstep, tmp_path: Path):
    first = run_lockstep("train", "reviews", *SMALL, "--epochs", "1", "--quiet")
    places = ["--data", "reviews.csv", "--output", "again", "--epochs", "1"]
    adapted = run_lockstep("train", "reviews", *places, "--pretrained", "out/model", "--lora", "r=2")
    assert (first.returncode, first.stderr) == (0, "")
    assert "epoch 1/1" not in first.stdout
    assert "rows; dropped: " in first.stdout  # belongs to the result
    assert (adapted.returncode, adapted.stderr) == (0, "")
    assert "of them trained; " in adapted.stdout
    assert not (tmp_path / "again" / "model" / "adapter_config.json").exists()


@pytest.mark.slow
def test_a_batch_size_is_found_and_a_later_run_has_the_same(run_lockstep, check_batch_size):
    words = ("train", "reviews", *SMALL, "--per-device-train-batch-size", "auto", "--memory-limit", "4000")
    first, second = (
        run_lockstep(*words, "--devices", "cpu:2", "--epochs", "1", *more) for more in ([], ["--overwrite"])
    )
    assert "batches of as many reviews as trial steps find" in first.stdout
    assert check_batch_size("per_device_train_batch_size", first, second) <= 80  # the training rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "nowhere.csv"], "the review file 'nowhere.csv'"),
        (["--pretrained", "."], "pretrained='.' could not be loaded"),
        (["--names", "bad"], "names='bad' was given for 2 classes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(words, said, run_lockstep, tmp_path: Path):
    done = run_lockstep("train", "reviews", *SMALL, *words)
    *warnings, error = done.stderr.splitlines()
    assert done.returncode == 2
    assert all(line.startswith("lockstep: warning: ") for line in warnings)
    assert error.startswith("lockstep: error: ")
    assert said in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("label,review\n1,很好\ngood,不错\n", "'reviews.csv', line 3: the label 'good'"),
        ("label,review\n1,很好\n1,不错\n", "reviews.csv has 1 different labels"),
        ("label,review\n1,很好\n0,很差\n", "the label 0, expected at least 3"),
    ],
)
def test_reviews_that_cannot_be_used_are_one_line(content: str, said: str, reviews: Path, run_lockstep):
    reviews.write_text(content, encoding="utf-8")
    done = run_lockstep("train", "reviews", *SMALL)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


@pytest.mark.slow
def test_a_loss_that_is_no_number_leaves_no_result(run_lockstep, tmp_path: Path):
    done = run_lockstep("train", "reviews", *SMALL, "--learning-rate", "1e30", "--clip-norm", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the loss became nan between step 1 and step " in done.stderr
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
@pytest.mark.workers
def test_ctrl_c_on_the_launcher_ends_a_run_in_one_line_that_says_how_to_resume(start_lockstep, tmp_path: Path):
    train = ("lockstep", "train", "reviews", *SMALL, "--devices", "cpu:2", "--epochs", "5000")
    process = start_lockstep("run", "--quiet", *train, forks_workers=True)
    for line in process.stdout:
        if line.startswith("epoch 2/5000"):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert said == "lockstep: interrupted; the same command with --resume continues it\n"
    assert list(tmp_path.glob("out/checkpoints/*/checkpoint-*/trainer_state.json"))
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
@pytest.mark.workers
def test_sigterm_on_the_launcher_has_all_workers_save_and_a_resumed_run_goes_on_there(
    start_lockstep, run_lockstep, tmp_path: Path
):
    words = ("run", "--quiet", "--workers", "2", "lockstep", "train", "reviews", *SMALL, "--epochs", "9")
    process = start_lockstep(*words, forks_workers=True)
    for line in process.stdout:
        if line.startswith("epoch 2/9"):
            break
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)

    assert process.returncode == 75, said
    assert "warning" not in said  # a slow start is told there too
    saved = re.search(r"SIGTERM: saved (\d+) updates to out/checkpoints/\S+/checkpoint-\1; start again to go on", out)
    assert saved is not None
    assert int(saved[1]) > 8
    resumed = run_lockstep(*words, "--resume", forks_workers=True)
    assert resumed.returncode == 0, resumed.stderr
    assert f"/checkpoint-{saved[1]}\n" in resumed.stdout
    assert "epoch 1/9" not in resumed.stdout
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_missing_package_is_one_line_before_anything_is_read(package: str, tmp_path: Path):
    hide = f"import sys; sys.modules[{package!r}] = None"
    code = f"{hide}; from lockstep_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", "reviews", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'torch-lockstep[text]'" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.workers
def test_workers_train_together_and_the_chief_alone_prints_and_writes(train_on_two_workers):
    train_on_two_workers("reviews", *SMALL)
