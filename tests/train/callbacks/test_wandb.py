from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.train.callbacks import BackupAndRestore, WeightsAndBiases
from lockstep.train.logs import History

if importlib.util.find_spec("wandb") is None:
    pytest.skip("the extra `loggers` is not installed", allow_module_level=True)

Fit = Callable[..., History]
Expected = Callable[[History], dict[str, dict[int, float]]]

BLOCK, HEADER = 32768, 7


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    import wandb

    wandb.teardown()  # the library's own process, and its threads


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: protocol buffers in the log format of LevelDB, after a header of the file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no record begins there
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


class Written:
    """What a run has written offline: its id, its exit code, its config, and its scalars by tag and step."""

    def __init__(self, path: Path) -> None:
        self.exit_code, self.config = None, {}
        self.scalars: dict[str, dict[int, float]] = {}
        for record in records(path):
            if record.HasField("run"):
                self.id = record.run.run_id
                self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("exit"):
                self.exit_code = record.exit.exit_code
            elif record.HasField("history"):
                row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                axis = "epoch" if "epoch" in row else "batch"
                for tag, value in row.items():
                    if tag != axis and not tag.startswith("_"):
                        self.scalars.setdefault(tag, {})[row[axis]] = value


def runs(folder: Path) -> list[Written]:
    """What is written, oldest run first, when the library's own process has ended, which writes it."""
    import wandb

    wandb.teardown()
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [Written(path) for path in paths]


def test_the_scalars_of_every_epoch_can_be_read_back(logged_fit: Fit, expected: Expected, tmp_path: Path):
    history = logged_fit(WeightsAndBiases("digits", config={"lr": 0.05}))
    (run,) = runs(tmp_path)
    assert run.scalars == expected(history)
    assert run.exit_code == 0
    assert run.config["lr"] == 0.05


def test_an_interrupted_run_is_closed_as_failed_and_goes_on_when_resumed(logged_fit: Fit, tmp_path: Path):
    logger, backup = WeightsAndBiases("digits", update_freq=2), tmp_path / "backup"
    logged_fit(logger, BackupAndRestore(backup), interrupted_in=1)
    logged_fit(WeightsAndBiases("digits", update_freq=2), BackupAndRestore(backup))
    first, second = runs(tmp_path)
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert first.id == second.id
    assert [list(run.scalars["epoch_loss"]) for run in (first, second)] == [[0], [1]]
    assert [list(run.scalars["batch_loss"]) for run in (first, second)] == [[2, 4], [4, 6]]


def test_a_run_of_the_program_is_used_and_left_open(logged_fit: Fit, tmp_path: Path):
    import wandb

    with wandb.init(project="mine") as own:
        logged_fit(WeightsAndBiases())
        assert wandb.run is own
    (run,) = runs(tmp_path)
    assert run.id == own.id
    assert list(run.scalars["epoch_loss"]) == [0, 1]
