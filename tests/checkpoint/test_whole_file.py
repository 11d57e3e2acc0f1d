from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.checkpoint.whole_file import write_whole


def test_the_file_holds_the_text_and_nothing_is_beside_it(tmp_path: Path):
    path = tmp_path / "new" / "a.json"

    write_whole(path, "first\r\n")
    write_whole(path, "zweite Fassung: ü\n")

    assert path.read_bytes() == "zweite Fassung: ü\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \udcff")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file" / "a.json", "text")
