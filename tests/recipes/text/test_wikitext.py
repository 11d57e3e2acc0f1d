from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.recipes.text.corpus import read_wikitext


def test_lines_over_100_characters_are_read_in_order_and_stripped(tmp_path: Path):
    for part in ("train", "valid", "test"):
        lines = [" = Heading = ", "", f" {part} " + "a" * 100 + " ", "b" * 100, "é" * 101]
        (tmp_path / f"wiki.{part}.tokens").write_text("\n".join(lines), encoding="utf-8")

    text = read_wikitext(tmp_path)

    assert text.train == ("train " + "a" * 100, "é" * 101)
    assert text.valid == ("valid " + "a" * 100, "é" * 101)
    assert text.test == ("test " + "a" * 100, "é" * 101)
    assert text.source == str(tmp_path)


def complaint(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read_wikitext(folder)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_missing_folder_is_named(tmp_path: Path):
    assert complaint(tmp_path / "none").startswith(f"the text folder '{tmp_path / 'none'}' does not exist")


def test_a_file_instead_of_a_folder_is_named(text_folder: Path):
    assert "does not exist or has 0 files" in complaint(text_folder / "wiki.train.tokens")


def test_a_missing_part_is_named(text_folder: Path, tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_bytes((text_folder / "wiki.train.tokens").read_bytes())

    assert "has 0 files *.valid.tokens, expected one" in complaint(tmp_path)


def test_two_files_for_one_part_are_named(tmp_path: Path):
    for name in ("a.train.tokens", "b.train.tokens"):
        (tmp_path / name).touch()

    assert "has 2 files *.train.tokens" in complaint(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "wiki.train.tokens").mkdir()

    assert "wiki.train.tokens' cannot be read as UTF-8" in complaint(tmp_path)


def test_a_file_that_is_not_utf8_is_named_with_the_place(tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_bytes(b"abc\xff")

    assert "wiki.train.tokens' cannot be read as UTF-8: 'utf-8' codec can't decode" in complaint(tmp_path)


def test_a_file_of_short_lines_only_is_named(tmp_path: Path):
    (tmp_path / "wiki.train.tokens").write_text("short\n" * 100)

    assert "wiki.train.tokens' has no line longer than 100 characters; join" in complaint(tmp_path)
