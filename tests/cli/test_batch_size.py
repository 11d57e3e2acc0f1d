"""``--batch-size auto`` in real processes: it finds a batch, says so in one line, and trains as with that number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.cli.app import parse
from lockstep.errors import ConfigError

MLM = {
    "--data": "text",
    "--cache-dir": "cache",
    "--layers": "1",
    "--hidden": "16",
    "--heads": "2",
    "--feed-forward": "32",
    "--vocabulary": "400",
    "--sequence-length": "24",
    "--epochs": "1",
}
SMALL_MLM = ["mlm", *(word for pair in MLM.items() for word in pair), "--quiet"]
IMAGES = {"--size": "32", "--width-multiplier": "0.25", "--epochs": "1", "--valid-fraction": "0.8"}
SMALL_IMAGES = ["images", *(word for pair in IMAGES.items() for word in pair), "--quiet"]


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> None:
    """A folder of text in wikitext's layout: 50, 10 and 10 lines of more than 100 characters."""
    folder = tmp_path / "text"
    folder.mkdir()
    for part, lines in {"train": 50, "valid": 10, "test": 10}.items():
        words = (f"{part} line {n} says that the {n % 7} replicas of step {n % 5} agree " * 3 for n in range(lines))
        (folder / f"small.{part}.tokens").write_text("\n".join(words))


def test_mlm_trains_with_the_batch_that_was_found_as_if_it_had_been_given(run_lockstep, tmp_path: Path):
    devices = ["--devices", "cpu:3"]
    auto = run_lockstep("train", *SMALL_MLM, *devices, "--batch-size", "auto", "--output", "auto")
    given = run_lockstep("train", *SMALL_MLM, *devices, "--batch-size", "48", "--output", "given")

    assert (auto.returncode, auto.stderr, given.returncode) == (0, "", 0)
    first, second = auto.stdout.splitlines()[:2]
    assert first.startswith("batch size auto: 48 lines fit; the limits are ")
    assert first.endswith(" MB for this process and the 50 lines of the training split")
    assert "global batches of 48 lines" in second
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("auto", "given")]
    for name, ours in weights[0].items():
        assert torch.equal(ours, weights[1][name]), name


def test_images_finds_a_batch_of_its_images(run_lockstep):
    done = run_lockstep("train", *SMALL_IMAGES, "--devices", "cpu:2", "--batch-size", "auto")

    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()[:2]
    found, images = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) images", first))
    assert 0 <= images - found < 2  # all of them, in equal shards
    assert f"global batches of {found:,} images" in second


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "big"], "batch_size='big' was given, expected an integer or auto"),
        (["--batch-size", "1.5"], "batch_size='1.5' was given, expected an integer or auto"),
        (["--batch-size", "0"], "batch_size=0 was given, expected at least 1"),
        (["--batch-size", "auto", "--heads", "3"], "heads=3 does not divide hidden=16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_when_it_is_read(words: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        parse(["train", *SMALL_MLM, *words])


def test_an_output_that_cannot_be_is_refused_before_the_search(run_lockstep):
    done = run_lockstep("train", *SMALL_MLM, "--batch-size", "auto", "--output", "text/small.train.tokens")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "is a file, expected a folder" in done.stderr


@pytest.mark.parametrize("recipe", ["mlm", "images"])
def test_the_help_says_that_it_can_be_left_to_the_search(recipe: str, capsys: pytest.CaptureFixture[str]):
    assert parse(["train", recipe, "--help"]) == 0

    said = capsys.readouterr().out
    assert "NUMBER|auto" in said
    assert "finds the largest that" in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize("words", [SMALL_MLM, SMALL_IMAGES])
def test_auto_is_refused_in_one_line_among_several_workers(words: list[str], capsys, monkeypatch, tmp_path: Path):
    workers = ["127.0.0.1:20000", "127.0.0.1:20001"]
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}})
    )
    monkeypatch.chdir(tmp_path)

    assert main(["train", *words, "--batch-size", "auto", "--output", "out"]) == 2

    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "--batch-size auto tries batches in one process, and TF_CONFIG declares 2 workers" in printed.err
    assert not (tmp_path / "out").exists()
