from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import CheckpointRecord, Contents, read_checkpoint, read_record
from lockstep.checkpoint.weights import read_weights
from lockstep.errors import CheckpointError


def contents(step: int, *, run: str = "a", monitored: float | None = None, numbers: int = 8) -> Contents:
    return Contents(
        record=CheckpointRecord(step=step, run=run, replicas=(2, 2), monitored=monitored),
        states={"optimizer": {"lr": 0.1, "moments": torch.full((numbers,), float(step))}},
        weights={"model": {"weight": torch.full((numbers,), float(step))}},
    )


def filled(path: Path, *steps: int) -> CheckpointFolder:
    folder = CheckpointFolder(path)
    for step in steps:
        folder.write(contents(step))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_whole(tmp_path: Path):
    path = CheckpointFolder(tmp_path).write(contents(120, monitored=float("inf")))

    back = read_checkpoint(path)

    assert path.name == "step-00000120"
    assert (
        back.record == CheckpointRecord(step=120, run="a", replicas=(2, 2), monitored=float("inf")) == read_record(path)
    )
    assert back.states["optimizer"]["lr"] == 0.1
    assert torch.equal(back.states["optimizer"]["moments"], torch.full((8,), 120.0))
    assert torch.equal(back.weights["model"]["weight"], torch.full((8,), 120.0))


def test_weights_lie_beside_as_one_plain_file_a_module(tmp_path: Path):
    one = CheckpointFolder(tmp_path / "one").write(contents(1))
    weights = {"generator": {"w": torch.ones(1)}, "critic": {"w": torch.zeros(1)}}
    two = CheckpointFolder(tmp_path / "two").write(Contents(record=contents(1).record, states={}, weights=weights))
    assert read_weights(one / "weights.safetensors")["weight"].tolist() == [1.0] * 8
    assert read_weights(two / "weights-critic.safetensors")["w"].tolist() == [0.0]
    assert read_checkpoint(two).weights.keys() == {"generator", "critic"}


def test_the_newest_is_found_by_looking(tmp_path: Path):
    folder = filled(tmp_path, 9, 10, 123456789)
    (tmp_path / "step-0000000x").mkdir()
    (tmp_path / ".step-00000011.0123456789ab.partial").mkdir()
    assert folder.newest() == tmp_path / "step-123456789"
    assert [path.name for path in folder.paths()] == ["step-00000009", "step-00000010", "step-123456789"]


def test_a_run_that_was_set_back_removes_what_lay_ahead(tmp_path: Path):
    folder = filled(tmp_path, 10, 20, 30)
    folder.write(contents(15))
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_later_checkpoints_of_another_run_are_an_error(tmp_path: Path):
    folder = filled(tmp_path, 10, 20)
    with pytest.raises(
        CheckpointError, match=r"cannot write step 15 .* another run has left step-00000020 there, .* restore from it"
    ):
        folder.write(contents(15, run="b"))
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    folder.write(contents(20, run="b"))


def test_the_last_and_the_best_are_kept(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    for step, value in enumerate([3.0, 1.0, float("nan"), 1.0, 2.0, 5.0]):
        folder.write(contents(step, monitored=value))

    assert folder.best(maximise=False) == tmp_path / "step-00000003"
    assert folder.best(maximise=True) == tmp_path / "step-00000005"
    folder.prune(2, 5, folder.best(maximise=False))

    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    folder.prune(None, 5, None)
    assert len(names(tmp_path)) == 3


def test_without_numbers_none_is_best(tmp_path: Path):
    assert filled(tmp_path, 1).best(maximise=True) is None
    assert CheckpointFolder(tmp_path / "none").newest() is None


def test_an_old_one_that_a_killed_writer_was_replacing_is_still_found(tmp_path: Path):
    folder = filled(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.0123456789ab.replaced")
    found = folder.read_newest(read_checkpoint)
    folder.write(contents(3))
    assert found is not None
    assert found[1].record.step == 2
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 16)


def change(path: Path, at: int, to: bytes) -> None:
    """Changes bytes of a file, whose size stays."""
    data = bytearray(path.read_bytes())
    data[at : at + len(to) if at >= 0 else None] = to
    path.write_bytes(data)


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "half a record": (lambda path: cut(path / "checkpoint.json"), r"damaged \(checkpoint\.json: .*\); remove it"),
    "an empty record": (
        lambda path: (path / "checkpoint.json").write_text("") and None,
        r"checkpoint\.json: Expecting",
    ),
    "no record": (lambda path: (path / "checkpoint.json").unlink(), r"is not a checkpoint: it has no checkpoint\.json"),
    "another's record": (lambda path: (path / "checkpoint.json").write_text("[]") and None, "that of another program"),
    "a newer record": (
        lambda path: (path / "checkpoint.json").write_text('{"format": "lockstep checkpoint", "version": 9}') and None,
        r"has version 9, this program reads version 1; use the version",
    ),
    "a record with holes": (
        lambda path: (path / "checkpoint.json").write_text('{"format": "lockstep checkpoint", "version": 1}') and None,
        r"damaged \(checkpoint\.json lacks .*files",
    ),
    "no weights": (lambda path: (path / "weights.safetensors").unlink(), r"weights\.safetensors: No such file"),
    "half the weights": (lambda path: cut(path / "weights.safetensors"), r"weights\.safetensors has \d+ bytes instead"),
    "a broken header": (lambda path: scribble(path / "weights.safetensors"), r"damaged \(.*[Hh]eader"),
    "a flipped bit": (
        lambda path: change(path / "weights.safetensors", -1, b"\x01"),
        r"weights\.safetensors: the checksum of",
    ),
    "zeros": (
        lambda path: change(path / "state" / "model-00001.safetensors", -4, bytes(4)),
        r"state/model-00001\S*: the ch",
    ),
    "another name": (
        lambda path: change(path / "weights.safetensors", 12, b"x"),
        r"weights\.safetensors: the checksum of its header",
    ),
    "an edited number": (
        lambda path: edit(path / "checkpoint.json", '"lr": 0.1', '"lr": 0.2'),
        r"the checksum of checkpoint\.json",
    ),
    "a deep record": (
        lambda path: (path / "checkpoint.json").write_text("[" * 100_000) and None,
        r"checkpoint\.json: ",
    ),
    "a record to wait for": (lambda path: pipe(path / "checkpoint.json"), r"checkpoint\.json is no regular file"),
    "a broken state": (
        lambda path: scribble(path / "state" / "model-00001.safetensors"),
        r"damaged \(.*[Hh]eader",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_line_that_names_it(tmp_path: Path, name: str):
    damage, message = DAMAGES[name]
    path = filled(tmp_path, 7).paths()[0]
    damage(path)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_checkpoint(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_one_warns_and_the_one_before_is_taken(tmp_path: Path, name: str):
    folder = filled(tmp_path, 1, 2)
    DAMAGES[name][0](tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=r"step-00000002.*\. Going back to an older checkpoint"):
        found = folder.read_newest(read_checkpoint)
    assert found is not None
    assert found[0].name == "step-00000001"


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_record_keeps_no_save_waiting(tmp_path: Path):
    folder = filled(tmp_path, 1, 2, 3)
    pipe(tmp_path / "step-00000001" / "checkpoint.json")
    folder.prune(1, 3, None, run=read_record(tmp_path / "step-00000003").run)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]  # whose the first is nobody knows


def test_ctrl_c_while_it_is_read_is_not_taken_for_damage(tmp_path: Path):
    many = {str(number): torch.ones(2) for number in range(200)}
    record = CheckpointRecord(step=1, run="a", replicas=(1,))
    path = CheckpointFolder(tmp_path).write(Contents(record=record, states={"many": many}))
    read_checkpoint(path)
    began = time.monotonic()
    read_checkpoint(path)
    took_s = time.monotonic() - began
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for moment in range(1, 61):  # torch makes another error of one in six
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, took_s * moment / 60)
                read_checkpoint(path)
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_where_all_are_damaged_it_is_an_error(tmp_path: Path):
    folder = filled(tmp_path, 1)
    DAMAGES["half a record"][0](tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"step-00000001 is damaged"):
        folder.read_newest(read_checkpoint)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot look for checkpoints in .*file: Not a directory"):
        CheckpointFolder(tmp_path / "file").paths()
    with pytest.raises(CheckpointError, match=r"file"):
        CheckpointFolder(tmp_path / "file").write(contents(1))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Lets writing beyond ``size`` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("size", [10, 3000, 2**16])
def test_where_there_is_no_room_nothing_is_left_and_the_old_ones_stay(tmp_path: Path, size: int):
    folder = filled(tmp_path, 1)

    with (
        files_of_at_most(size),
        pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-00000002: .* has room") as raised,
    ):
        folder.write(contents(2, numbers=2**16))

    assert "\n" not in str(raised.value)
    assert names(tmp_path) == ["step-00000001"]
    assert read_checkpoint(folder.paths()[0]).record.step == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_leaves_nothing(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        folder = filled(disk / "checkpoints", 1)
        with pytest.raises(CheckpointError, match=r"No space left on device.*; choose a folder .* has room"):
            folder.write(contents(2, numbers=2**16))
        assert names(disk / "checkpoints") == ["step-00000001"]
        assert folder.newest() == disk / "checkpoints" / "step-00000001"
    finally:
        subprocess.run(["umount", disk], check=True)


UNREADABLE = """
import os, sys
from pathlib import Path
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.errors import CheckpointError
os.setuid(65534)
for act in (lambda f: f.newest(), lambda f: f.remove_all()):
    try:
        act(CheckpointFolder(Path(sys.argv[1])))
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_folder_without_permission_is_one_line(tmp_path: Path):
    filled(tmp_path / "mine", 1)
    (tmp_path / "mine").chmod(0o700)

    done = subprocess.run(
        [sys.executable, "-c", UNREADABLE, str(tmp_path / "mine")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "cannot look for checkpoints in" in done.stdout
    assert all("Permission denied" in line for line in done.stdout.splitlines())
    assert json.loads((tmp_path / "mine" / "step-00000001" / "checkpoint.json").read_text())["step"] == 1
