from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from lockstep.errors import DataError
from lockstep.recipes.images import pixels
from lockstep.recipes.images.pixels import PixelStore, cache_key, decode_to_disk, decode_to_memory

if TYPE_CHECKING:
    from tests.recipes.images.conftest import MakeTree


@pytest.fixture
def root(make_tree: MakeTree) -> Path:
    root = make_tree("data", {"a": 5, "b": 4})
    (root / "b" / "001.png").write_bytes(b"not an image")
    return root


def store(root: Path, *, size: int = 6, folder: str = "cache", decoded: list[int] | None = None) -> PixelStore:
    paths = sorted(root.rglob("*.png"))
    counted = (lambda done, of: decoded.append(done)) if decoded is not None else None
    return decode_to_disk(paths, root=root, size=size, workers=0, cache_dir=root.parent / folder, progress=counted)


def test_the_file_holds_what_memory_would_and_is_read_again(root: Path):
    first: list[int] = []
    again: list[int] = []

    made, kept = store(root, decoded=first), store(root, decoded=again)

    expected = decode_to_memory(sorted(root.rglob("*.png")), size=6, workers=0)
    for one in (made, kept):
        assert np.array_equal(one.pixels, expected.pixels)
        assert one.broken == expected.broken == {6: "not an image"}
    assert (len(first), len(again)) == (9, 0)
    (file,) = (root.parent / "cache").iterdir()
    assert kept.file == file
    assert kept.description == f"0.0 MB decoded in {file}"
    assert not kept.pixels.flags.writeable


def replaced(root: Path) -> None:
    path = root / "a" / "001.png"
    before = path.stat()
    Image.new("RGB", (10, 12), (9, 9, 9)).save(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def added(root: Path) -> None:
    Image.new("RGB", (10, 12)).save(root / "a" / "new.png")


def removed(root: Path) -> None:
    (root / "a" / "001.png").unlink()


def renamed(root: Path) -> None:
    (root / "a" / "001.png").rename(root / "a" / "zzz.png")


@pytest.mark.parametrize("change", [replaced, added, removed, renamed])
def test_a_change_is_noticed_and_replaces_the_file(change, root: Path):
    store(root)
    change(root)
    decoded: list[int] = []

    after = store(root, decoded=decoded)

    paths = sorted(root.rglob("*.png"))
    assert len(decoded) == len(paths)
    assert np.array_equal(after.pixels, decode_to_memory(paths, size=6, workers=0).pixels)
    assert len(list((root.parent / "cache").iterdir())) == 1


def test_another_size_is_another_file(root: Path):
    store(root)
    store(root, size=8)

    assert len(list((root.parent / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"x" * 4, b"x" * 900])
def test_a_damaged_file_is_made_anew(damage: bytes, root: Path):
    file = store(root).file
    assert file is not None
    file.write_bytes(damage)
    decoded: list[int] = []

    store(root, decoded=decoded)

    assert len(decoded) == 9


def test_the_versions_that_decode_are_part_of_the_key(root: Path, monkeypatch: pytest.MonkeyPatch):
    paths = sorted(root.rglob("*.png"))
    before = cache_key(paths, root=root, size=6)
    monkeypatch.setattr("PIL.__version__", "0.0")

    assert cache_key(paths, root=root, size=6) != before


def test_an_interrupted_run_leaves_no_file(root: Path):
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_to_disk(
            sorted(root.rglob("*.png")), root=root, size=6, workers=0, cache_dir=root.parent / "cache", progress=stop
        )

    assert list((root.parent / "cache").iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.recipes.images.pixels import decode_to_disk

root = Path(sys.argv[1])
files = sorted(root.rglob("*.png"))
kill = lambda done, of: os.kill(os.getpid(), signal.SIGKILL)
decode_to_disk(files, root=root, size=6, workers=0, cache_dir=root.parent / "cache", progress=kill)
"""


def test_what_a_killed_run_leaves_is_cleared_away_by_the_next(root: Path, python: Callable[..., Popen[str]]):
    assert python("-c", KILLED, str(root)).wait(60) == -signal.SIGKILL
    (left,) = (root.parent / "cache").iterdir()
    assert left.name.endswith(".partial")

    made = store(root)

    assert list((root.parent / "cache").iterdir()) == [made.file]


def test_what_another_run_is_writing_is_left_alone(root: Path):
    paths, folder = sorted(root.rglob("*.png")), root.parent / "cache"

    def meanwhile(done: int, of: int) -> None:
        if done == 1:
            store(root)

    one = decode_to_disk(paths, root=root, size=6, workers=0, cache_dir=folder, progress=meanwhile)

    assert np.array_equal(one.pixels, decode_to_memory(paths, size=6, workers=0).pixels)
    assert list(folder.iterdir()) == [one.file]


def test_a_folder_that_cannot_be_written_to_is_named(root: Path):
    (root.parent / "file").write_text("")

    with pytest.raises(DataError, match=r"cannot be cached in '.*file'.*; set cache_dir"):
        store(root, folder="file")


def test_too_little_room_is_said_before_anything_is_decoded(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixels.shutil, "disk_usage", lambda folder: _Usage())
    decoded: list[int] = []

    with pytest.raises(DataError, match=r"take 0.0 MB, and '.*cache' has 0.0 MB free; set another cache_dir"):
        store(root, decoded=decoded)

    assert decoded == []
    assert list((root.parent / "cache").iterdir()) == []


class _Usage:
    free = 10
