"""A finished run of any recipe is not replaced without ``--overwrite``, and ``--resume`` refuses other settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep_tools.cli import main
from lockstep_tools.cli.training_command import TrainingCommand

pytestmark = pytest.mark.slow

IMAGES = "images --data pictures --size 8 --output-stride 8 --width-multiplier 0.1 --batch-size 8 --workers 0"
TEXT = "mlm --data text --vocabulary 60 --layers 1 --hidden 8 --heads 1 --feed-forward 8 --sequence-length 16"
REVIEWS = "reviews --data reviews.csv --vocabulary 60 --layers 1 --hidden 8 --feed-forward 8"
SMALL = ["--epochs", "1", "--devices", "cpu:1", "--quiet", "--output", "out"]


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> None:
    """Pictures, text and reviews where the command runs."""
    random = np.random.default_rng(0)
    for place in ("cat", "dog"):
        (tmp_path / "pictures" / place).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(256, size=(8, 8, 3), dtype="uint8")
            Image.fromarray(pixels).save(tmp_path / "pictures" / place / f"{number}.png")
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "text" / f"a.{split}.tokens").write_text(
            ("the quick brown fox jumps over the lazy dog " * 3 + "\n") * 8
        )
    reviews = [f"{number % 2},{('bad', 'good')[number % 2]} room {number}" for number in range(20)]
    (tmp_path / "reviews.csv").write_text("\n".join(["label,review", *reviews]) + "\n")


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("recipe", [IMAGES, TEXT, REVIEWS])
def test_a_finished_run_is_kept_until_it_is_to_be_replaced(recipe: str, run_lockstep, tmp_path: Path):
    words = ["train", *recipe.split(), *SMALL]
    assert run_lockstep(*words).returncode == 0
    finished = files_of(tmp_path / "out")

    refused = run_lockstep(*words, "--seed", "1")

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "--output has the results of a finished run, 'out/model/README.md'; give another --output, or" in (
        refused.stderr
    )
    assert files_of(tmp_path / "out") == finished

    assert run_lockstep(*words, "--seed", "1", "--overwrite").returncode == 0
    replaced = files_of(tmp_path / "out")
    weights = Path("model", "model.safetensors")
    assert replaced[weights] != finished[weights]


@pytest.mark.parametrize("words", [["--backup", "none"], ["--resume"], []])
@pytest.mark.parametrize("left", ["model/model.safetensors", "result.json"])
def test_whatever_a_backup_would_do_a_finished_run_is_kept(left: str, words: list[str], run_lockstep, tmp_path: Path):
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / left).write_bytes(b"three hours")
    refused = run_lockstep("train", *IMAGES.split(), *SMALL, *words)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"'out/{left}'" in refused.stderr
    assert files_of(tmp_path / "out") == {Path(left): b"three hours"}


def test_a_run_that_ended_before_its_results_begins_anew(run_lockstep, tmp_path: Path):
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "20260101-000000").mkdir(parents=True)
    (tmp_path / "out" / "model" / ".model.safetensors.0.partial").write_bytes(b"half")
    assert run_lockstep("train", *IMAGES.split(), *SMALL).returncode == 0


def rows_of(folder: Path) -> list[list[str]]:
    """The rows of ``history.csv``, without the times."""
    return [line.split(",")[:-3] for line in (folder / "out" / "history.csv").read_text().splitlines()]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("recipe", [IMAGES, TEXT, REVIEWS])
def test_resume_refuses_other_settings_and_need_not_train_again(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    words = ["train", *recipe.split(), *SMALL]

    def run(*others: str) -> tuple[int, str]:
        code = main([*words, *others])
        return code, capsys.readouterr().err

    with monkeypatch.context() as patch:  # Ctrl-C after the training, before the results are written
        patch.setattr(TrainingCommand, "_write", interrupt)
        assert run() == (130, "lockstep: interrupted; the same command with --resume continues it\n")
    saved = files_of(tmp_path / "out")

    for changed, value in (("--seed", "1"), ("--epochs", "2")):
        code, said = run(changed, value, "--resume")
        name = changed.removeprefix("--")
        assert (code, said.count("\n")) == (1, 1)
        assert f"of a run with {name}=" in said
        assert f"this run has {name}={value}" in said
        assert "resume with the saved settings, or start anew in another folder" in said
    code, said = run()
    assert (code, "add --resume to continue it" in said) == (2, True)
    assert {path: content for path, content in files_of(tmp_path / "out").items() if path in saved} == saved

    assert run("--resume") == (0, "")
    assert len(rows_of(tmp_path)) == 2
    code, said = run("--resume")
    assert (code, "has the results of a finished run" in said) == (2, True)


def test_reviews_go_on_in_the_folder_of_an_interrupted_run(run_lockstep, tmp_path: Path):
    words = ["train", *REVIEWS.split(), *SMALL]
    assert run_lockstep(*words, "--epochs", "2").returncode == 0
    whole = rows_of(tmp_path)

    finished = run_lockstep(*words, "--epochs", "2", "--resume")
    assert finished.returncode == 2
    assert "has the results of a finished run" in finished.stderr

    for path in ("result.json", "history.csv", "curves.png"):
        (tmp_path / "out" / path).unlink()
    for folder in (tmp_path / "out" / "model", max((tmp_path / "out" / "checkpoints").glob("*/checkpoint-*"))):
        shutil.rmtree(folder)
    refused = run_lockstep(*words, "--epochs", "2")
    assert refused.returncode == 2
    assert "has the backup of an interrupted run, 'out/checkpoints/" in refused.stderr
    assert "add --resume to continue it" in refused.stderr

    assert run_lockstep(*words, "--epochs", "2", "--resume").returncode == 0
    assert rows_of(tmp_path) == whole
    assert (
        len(list((tmp_path / "out" / "checkpoints").iterdir())) == len(list((tmp_path / "out" / "logs").iterdir())) == 1
    )

    assert run_lockstep(*words, "--epochs", "3", "--resume", "--overwrite").returncode == 0
    assert len(rows_of(tmp_path)) == 4
