from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tests.recipes.text.programs.tensorflow_lines import adversarial_files

from lockstep.errors import DataError
from lockstep_tools.recipes.text.corpus import lines_as_tf_data, read_wikitext

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
    text = read_wikitext(tmp_path)
    texts = [line.encode("latin-1").decode().removeprefix("\ufeff") for line in expected["kept"]]
    assert list(text.train) == list(text.valid) == list(text.test) == texts
    assert text.dropped == (expected["read"] - len(texts),) * 3


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_the_lines_of_each_split_are_read_in_order_and_counted(suffix: str, tmp_path: Path):
    for number, split in enumerate(SPLITS):
        lines = [" = Heading = ", "", f" {split} " + "a" * 100 + " ", *["b" * 100] * number, "é" * 51]
        (tmp_path / f"wiki.{split}.{suffix}").write_text("\n".join(lines), encoding="utf-8")

    text = read_wikitext(tmp_path)

    assert text.train == (" train " + "a" * 100 + " ", "é" * 51)
    assert text.valid == (" valid " + "a" * 100 + " ", "é" * 51)
    assert text.test == (" test " + "a" * 100 + " ", "é" * 51)
    assert text.source == str(tmp_path)
    assert text.dropped == (2, 3, 4)
    counts = "train 2 of 4 lines, valid 2 of 5 lines, test 2 of 6 lines"
    assert str(text) == f"{tmp_path}: {counts}; the others have at most 100 bytes"


def complaint(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read_wikitext(folder)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_is_named(tmp_path: Path):
    assert complaint(tmp_path / "none").startswith(f"the text folder '{tmp_path / 'none'}' does not exist")


def test_a_file_instead_of_a_folder_is_named(text_folder: Path):
    assert "is a file, expected its folder" in complaint(text_folder / "wiki.train.tokens")


def test_a_missing_part_is_named(text_folder: Path, tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_bytes((text_folder / "wiki.train.tokens").read_bytes())
    assert "has no file for *.valid.tokens or *.valid.raw, expected one" in complaint(tmp_path)


def test_two_files_for_one_part_are_named(tmp_path: Path):
    for name in ("a.train.tokens", "a.train.raw"):
        (tmp_path / name).touch()
    assert "has a.train.raw and a.train.tokens for *.train.tokens or *.train.raw, expected one" in complaint(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "wiki.train.tokens").mkdir()
    assert "wiki.train.tokens' cannot be read as UTF-8" in complaint(tmp_path)


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_bytes(b"abc\nab\xff\n")
    said = complaint(tmp_path)
    assert "wiki.train.tokens' cannot be read as UTF-8 in line 2: 'utf-8' codec can't decode byte 0xff" in said


@pytest.mark.parametrize(("content", "lines"), [("short\n" * 1200, "1,200"), ("", "0")])
def test_a_file_without_a_long_line_is_named(content: str, lines: str, tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_text(content)
    assert f"wiki.train.tokens' has {lines} lines, none of more than 100 bytes; join the" in complaint(tmp_path)
