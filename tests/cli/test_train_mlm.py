"""``lockstep train mlm`` in real processes: what it prints and leaves, what it refuses, and Ctrl-C."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lockstep_tools.cli import main

PLACES = {"--data": "text", "--output": "out"}
SIZES = {
    "--layers": "1",
    "--hidden": "16",
    "--heads": "2",
    "--feed-forward": "32",
    "--vocabulary": "400",
    "--sequence-length": "24",
    "--batch-size": "8",
    "--learning-rate": "0.01",
}
SMALL = [word for pair in {**PLACES, **SIZES}.items() for word in pair]
HEADER = ["epoch", "loss", "accuracy", "val_loss", "val_accuracy", "seconds", "ms/step", "examples/s"]


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> Path:
    """A folder of text in wikitext's layout: 50, 10 and 10 lines of more than 100 characters."""
    folder = tmp_path / "text"
    folder.mkdir()
    for part, lines in {"train": 50, "valid": 10, "test": 10}.items():
        words = (f"{part} line {n} says that the {n % 7} replicas of step {n % 5} agree " * 3 for n in range(lines))
        (folder / f"small.{part}.tokens").write_text("\n".join(words))
    return folder


def test_a_run_prints_devices_epochs_and_result_and_leaves_its_files(run_lockstep, check_results, tmp_path: Path):
    done = run_lockstep("train", "mlm", *SMALL, "--devices", "cpu:3", "--epochs", "2", "--check-exact")

    assert (done.returncode, done.stderr) == (0, "")
    printed = [line.split() for line in done.stdout.splitlines()]
    assert printed[0][:7] == ["masked", "language", "model", "on", "3", "logical", "devices:"]
    assert ["cpu:2", "cpu:0", "1", "of", "3"] in printed
    assert [row[0] for row in printed[printed.index(HEADER) + 2 :][:2]] == ["1", "2"]
    assert [row[0] for row in printed if row and row[0] in ("test", "model", "logs", "curves")] == [
        "test",
        "model",
        "logs",
        "curves",
    ]
    assert "data    text: train 50 lines, valid 10 lines, test 10 lines\n" in done.stdout
    assert "3 replicas against one device" in done.stdout
    table = re.search(
        "hidden tokens of the test text, .*; the surest, each answer once:\n\n.+\n.+\n((?:.+\n)+)", done.stdout
    )
    answers = [line.split()[1] for line in table[1].splitlines()]
    assert len(set(answers)) == len(answers)
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert list((tmp_path / "out" / "logs").rglob("events.out.tfevents*"))
    assert "'sequence': 'the first" in check_results(done.stdout)


@pytest.mark.slow
@pytest.mark.workers
def test_workers_that_divide_the_model_are_started_and_one_of_them_speaks(run_lockstep, tmp_path: Path):
    grid = ["--layers", "2", "--pipeline", "2", "--tensor", "2"]

    done = run_lockstep("train", "mlm", *SMALL, *grid, "--epochs", "2", "--check-exact")

    assert (done.returncode, done.stderr) == (0, "")
    printed = [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.startswith("masked language model on 4 workers, data=1, pipeline=2, tensor=2: ")
    assert [row[0] for row in printed[printed.index(HEADER) + 2 :][:2]] == ["1", "2"]
    assert "data=1, pipeline=2, tensor=2 against one device in plain PyTorch, 3 steps, no dropout:" in done.stdout
    (off,) = re.findall(r"SGD +largest difference in loss (\S+), in weights (\S+) ", done.stdout)
    assert max(map(float, off)) < 1e-5
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert len([name for name in weights if name.endswith("attention.self.query.weight")]) == 2
    assert {weights[name].shape for name in weights if name.endswith("query.weight")} == {(16, 16)}


@pytest.mark.slow
def test_a_quiet_run_prints_the_result_alone(run_lockstep):
    done = run_lockstep("train", "mlm", *SMALL, "--epochs", "1", "--quiet")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == HEADER
    assert re.fullmatch("fingerprint [0-9a-f]{16}", done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_batch_size_is_found_and_a_later_run_has_the_same(run_lockstep, check_batch_size):
    words = [*SMALL, "--batch-size", "auto", "--memory-limit", "4000", "--devices", "cpu:2", "--epochs", "1"]

    first, second = (run_lockstep("train", "mlm", *words, *more) for more in ([], ["--overwrite"]))

    assert "batches of as many lines as trial steps find" in first.stdout
    assert check_batch_size("batch_size", first, second) <= 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "0"], "epochs=0 was given"),
        (["--heads", "3"], "heads=3 does not divide hidden=16"),
        (["--devices", "cpu:0,cpu:0"], "cpu:0"),
        (["--devices", "cpu:0,cpu:9"], "cpu:9"),
        (["--data", "nowhere"], "the text folder 'nowhere' does not exist"),
        (["--data", "nowhere", "--layers", "2", "--pipeline", "2"], "the text folder 'nowhere' does not exist"),
        (["--output", "text/small.train.tokens"], "is a file, expected a folder"),
        (["--tensor", "3"], "tensor=3 does not divide heads=2; choose 1 or 2"),
        (["--pipeline", "2"], "is 2 stages, and the model has 1 layers; choose"),
        (["--tensor", "2", "--devices", "cpu:2"], "--tensor 2 gives each worker one device; leave one of them out"),
        (["--tensor", "2", "--batch-size", "auto"], "--tensor 2 divides the model among workers; give a number"),
        (["--memory-limit", "100"], "add --batch-size auto"),
        (["--microbatches", "4"], "--microbatches says how workers divide a model"),
        (["--tensor", "2", "--output", "text/small.train.tokens"], "is a file, expected a folder"),
        (["--backup", "0"], "--backup 0 was given, expected epoch, none, or a number of global batches"),
        (["--backup", "none", "--resume"], "--backup none"),
        (["--output", "text/small.train.tokens/below"], "'text/small.train.tokens' is a file, expected a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(words, said, run_lockstep, tmp_path: Path):
    done = run_lockstep("train", "mlm", *SMALL, *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("lockstep: error: ")
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_is_terminated_is_gone_on_with_where_that_is_asked_for(run_lockstep, start_lockstep, tmp_path: Path):
    words = ("train", "mlm", *SMALL, "--epochs", "30", "--patience", "0", "--backup", "50")
    process = start_lockstep(*words)
    for line in process.stdout:
        if line.startswith("epoch 2/30"):
            process.send_signal(signal.SIGTERM)
            break
    out, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (75, "")
    (kept,) = (tmp_path / "out" / "backup").iterdir()
    assert f"to out/backup/{kept.name}; start again to go on" in out

    refused = run_lockstep(*words)
    assert refused.returncode == 2
    assert f"has the backup of an interrupted run, 'out/backup/{kept.name}'; add --resume" in refused.stderr
    assert refused.stderr.count("\n") == 1

    done = run_lockstep(*words, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"going on from out/backup/{kept.name}: epoch " in done.stdout
    assert "epoch 1/30" not in done.stdout
    printed = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in printed[printed.index(HEADER) + 2 :][:30]] == [str(epoch) for epoch in range(1, 31)]
    assert not (tmp_path / "out" / "backup").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_the_way", "said"),
    [("logs", "'out/logs' is a file, expected a folder"), ("model", "'out/model' is a file, expected a folder")],
)
def test_a_file_where_results_go_is_seen_before_the_training(in_the_way, said, run_lockstep, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / in_the_way).write_text("mine")
    done = run_lockstep("train", "mlm", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [in_the_way]


@pytest.mark.slow
def test_a_folder_where_the_curves_go_is_seen_before_the_training(run_lockstep, tmp_path: Path):
    (tmp_path / "out" / "curves.png").mkdir(parents=True)
    done = run_lockstep("train", "mlm", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--output has a folder 'out/curves.png', expected a file" in done.stderr


@pytest.mark.slow
def test_a_tilde_is_the_home_folder(run_lockstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "logs").parent.mkdir()
    (tmp_path / "home" / "logs").write_text("mine")
    said = run_lockstep("train", "mlm", *SMALL, "--output", "~").stderr
    assert f"'{tmp_path / 'home' / 'logs'}' is a file" in said


@pytest.mark.slow
def test_a_folder_without_a_model_is_refused_in_one_line(run_lockstep):
    places = [word for pair in PLACES.items() for word in pair]
    done = run_lockstep("train", "mlm", *places, "--pretrained", "text")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'text'" in done.stderr


@pytest.mark.slow
def test_a_setting_without_effect_is_a_warning_in_one_line(run_lockstep):
    done = run_lockstep("train", "mlm", *SMALL, "--pretrained", "text")
    warning, error = done.stderr.splitlines()
    assert warning.startswith("lockstep: warning: without effect, since pretrained='text': layers")
    assert error.startswith("lockstep: error: ")


@pytest.mark.slow
def test_a_loss_that_is_no_number_names_its_step_and_leaves_no_result(run_lockstep, tmp_path: Path):
    done = run_lockstep("train", "mlm", *SMALL, "--learning-rate", "1e30")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "step" in done.stderr
    assert "loss" in done.stderr
    assert not (tmp_path / "out" / "model").exists()
    assert not (tmp_path / "out" / "curves.png").exists()


def test_ctrl_c_ends_a_run_in_one_line(start_lockstep, tmp_path: Path):
    process = start_lockstep("train", "mlm", *SMALL, "--devices", "cpu:2", "--epochs", "5000", "--patience", "0")
    for line in process.stdout:
        if line.startswith("epoch 2/5000"):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130
    assert re.fullmatch(r"lockstep: interrupted; .* --resume.*\n", said)
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(("package", "extra"), [("tokenizers", "text"), ("matplotlib", "plots")])
def test_a_missing_package_is_one_line_before_anything_is_trained(
    package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["train", "mlm", *SMALL]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install 'torch-lockstep[{extra}]'" in said
    assert not (tmp_path / "out").exists()
