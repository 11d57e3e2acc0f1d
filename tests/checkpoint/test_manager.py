from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import Contents, read_checkpoint
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.errors import CheckpointError, ConfigError

LIMIT_S = 30.0


@pytest.fixture
def progress() -> dict[str, Any]:
    return {"step": 0, "tensor": torch.zeros(3)}


@pytest.fixture
def manager(progress: dict[str, Any], tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(Checkpoint(progress=progress), tmp_path, asynchronous=True)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write up until the event is set."""
    go_on = threading.Event()

    write = CheckpointFolder.write

    def late(folder: CheckpointFolder, contents: Contents) -> Path:
        assert go_on.wait(LIMIT_S)
        return write(folder, contents)

    monkeypatch.setattr(CheckpointFolder, "write", late)
    yield go_on
    go_on.set()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("best", "kept"),
    [(None, [4, 5]), ("min", [1, 4, 5]), ("max", [3, 4, 5])],
)
def test_the_last_and_the_best_stay(progress: dict[str, Any], tmp_path: Path, best: Any, kept: list[int]):
    manager = CheckpointManager(Checkpoint(progress=progress), tmp_path, keep=2, best=best)
    for step, value in enumerate([3.0, 1.0, 2.0, 9.0, 4.0, 5.0]):
        manager.save(step, monitored=value)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]
    assert manager.checkpoints == [tmp_path / name for name in names(tmp_path)]
    if best is not None:
        assert manager.best == tmp_path / f"step-{kept[0]:08d}"


def test_a_restored_manager_goes_on_in_the_same_run(progress: dict[str, Any], tmp_path: Path):
    CheckpointManager(Checkpoint(progress=progress), tmp_path).save(5)
    other = CheckpointManager(Checkpoint(progress=progress), tmp_path)
    with pytest.raises(CheckpointError, match="another run has left step-00000005"):
        other.save(1)
    other.restore_or_initialize()
    other.save(1)
    assert names(tmp_path) == ["step-00000001"]


def test_the_state_is_that_of_the_call_though_it_is_written_later(
    manager: CheckpointManager, progress: dict[str, Any], held: threading.Event
):
    path = manager.save(1)
    progress["step"] = 7
    progress["tensor"].fill_(7.0)
    assert not path.exists()
    held.set()
    manager.wait()

    shared = read_checkpoint(path).states["progress"]["shared"]["state"]
    assert shared["step"] == 0
    assert shared["tensor"].tolist() == [0.0] * 3


def test_the_next_save_waits_for_the_one_before(manager: CheckpointManager, held: threading.Event, tmp_path: Path):
    manager.save(1)
    threading.Timer(0.05, held.set).start()
    manager.save(2)
    assert "step-00000001" in names(tmp_path)
    manager.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", [lambda m: m.save(2), lambda m: m.wait(), lambda m: m.restore_or_initialize()])
def test_an_error_is_raised_by_the_next_call_once(
    progress: dict[str, Any], tmp_path: Path, call: Callable[[CheckpointManager], Any]
):
    (tmp_path / "file").touch()
    manager = CheckpointManager(Checkpoint(progress=progress), tmp_path / "file", asynchronous=True)
    manager.save(1)
    with pytest.raises(CheckpointError, match="file"):
        call(manager)
    manager.wait()


def test_the_block_waits_at_its_end(manager: CheckpointManager, tmp_path: Path):
    with manager:
        manager.save(1)
    assert names(tmp_path) == ["step-00000001"]


def test_after_an_error_in_the_block_the_write_is_finished(manager: CheckpointManager, tmp_path: Path):
    def fails() -> None:
        with manager:
            manager.save(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()

    assert names(tmp_path) == ["step-00000001"]


def test_removing_the_own_checkpoints_removes_the_empty_folder(manager: CheckpointManager, tmp_path: Path):
    manager.save(1)
    (tmp_path / "mine").touch()
    manager.remove_own(with_folder=True)
    assert names(tmp_path) == ["mine"]
    (tmp_path / "mine").unlink()
    manager.remove_own(with_folder=True)
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0 was given"),
        ({"keep": True}, "keep=True"),
        ({"best": "auto"}, "best='auto' is unknown"),
    ],
)
def test_bad_settings_are_refused(progress: dict[str, Any], arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        CheckpointManager(Checkpoint(progress=progress), "folder", **arguments)


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_step_that_is_no_number_is_refused(manager: CheckpointManager, step: Any):
    with pytest.raises(ConfigError, match=r"step=.* was given, expected .*at least 0"):
        manager.save(step)
