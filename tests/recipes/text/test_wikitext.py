from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recipes.text.programs.tensorflow_lines import adversarial_files

from lockstep.errors import DataError
from lockstep_tools.recipes.text.corpus import lines_as_tf_data, read_folder

SPLITS = ("train", "valid", "test")
BY_TENSORFLOW = json.loads(Path(__file__).with_name("tensorflow_lines.json").read_text())["cases"]


@pytest.mark.parametrize("case", BY_TENSORFLOW)
def test_a_file_has_the_lines_that_tensorflow_reads_and_keeps(case: str, tmp_path: Path):
    """``programs/tensorflow_lines.py`` recorded them."""
    expected, content = BY_TENSORFLOW[case], adversarial_files()[case]

    lines = list(lines_as_tf_data(io.BytesIO(content)))

    assert len(lines) == expected["read"]
    if not expected["kept"]:
        return
    for split in SPLITS:
        (tmp_path / f"wiki.{split}.raw").write_bytes(content)
    text = read_folder(tmp_path)
    texts = [line.encode("latin-1").decode().removeprefix("\ufeff") for line in expected["kept"]]
    assert list(text.train) == list(text.valid) == list(text.test) == texts
    assert text.dropped == (expected["read"] - len(texts),) * 3


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_the_lines_of_each_split_are_read_in_order_and_counted(suffix: str, tmp_path: Path):
    for number, split in enumerate(SPLITS):
        lines = [" = Heading = ", "", f" {split} " + "a" * 100 + " ", *["b" * 100] * number, "é" * 51]
        (tmp_path / f"wiki.{split}.{suffix}").write_text("\n".join(lines), encoding="utf-8")

    text = read_folder(tmp_path)

    assert text.train == (" train " + "a" * 100 + " ", "é" * 51)
    assert text.valid == (" valid " + "a" * 100 + " ", "é" * 51)
    assert text.test == (" test " + "a" * 100 + " ", "é" * 51)
    assert text.source == str(tmp_path)
    assert text.dropped == (2, 3, 4)
    counts = "train 2 of 4 lines, valid 2 of 5 lines, test 2 of 6 lines"
    assert str(text) == f"{tmp_path}: {counts}; the others have at most 100 bytes"


def test_other_text_files_are_split_by_position(tmp_path: Path):
    long = [f"{number:03} " + "a" * 100 for number in range(40)]
    # A blank line between paragraphs: split with it, the test would be blank lines alone.
    (tmp_path / "a.txt").write_text("\n\n".join(long[:25]) + "\n")
    (tmp_path / "b.txt").write_text("\n\n".join(long[25:]) + "\n\n")
    (tmp_path / "notes.md").write_text("none of the text")

    text = read_folder(tmp_path)

    assert (text.valid, text.test) == ((long[18], long[38]), (long[19], long[39]))
    assert text.train == tuple(long[:18] + long[20:38])
    assert sum(text.dropped) == 24 + 15
    (tmp_path / "wiki.train.raw").write_text("a" * 101)
    with pytest.raises(DataError, match="has no file for"):
        read_folder(tmp_path)


TRAIN, UTF8 = "wiki.train.tokens", "wiki.train.tokens' cannot be read as UTF-8"


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder: folder.rmdir(), "' does not exist"),
        (lambda folder: folder.rmdir() or folder.touch(), "is a file, expected its folder"),
        (
            lambda folder: (folder / TRAIN).write_text("a" * 101),
            "has no file for *.valid.tokens or *.valid.raw, expected one",
        ),
        (
            lambda folder: [(folder / name).touch() for name in ("a.train.tokens", "a.train.raw")],
            "has a.train.raw and a.train.tokens for *.train.tokens or *.train.raw, expected one",
        ),
        (lambda folder: (folder / TRAIN).mkdir(), UTF8),
        (
            lambda folder: (folder / TRAIN).write_bytes(b"abc\nab\xff\n"),
            f"{UTF8} in line 2: 'utf-8' codec can't decode byte 0xff",
        ),
        (lambda folder: (folder / TRAIN).write_text("short\n" * 1200), f"{TRAIN}' has 1,200 lines, none of more than"),
        (lambda folder: (folder / TRAIN).write_text(""), f"{TRAIN}' has 0 lines, none of more than 100 bytes; join"),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_in_one_line(
    make: Callable[[Path], object], complaint: str, tmp_path: Path
):
    folder = tmp_path / "text"
    folder.mkdir()
    make(folder)
    with pytest.raises(DataError) as raised:
        read_folder(folder)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
