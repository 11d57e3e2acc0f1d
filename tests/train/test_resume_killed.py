"""Processes that are killed while they train and save, and the ones after them that go on: the end is the same."""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.weights import read_weights
from lockstep.train.callbacks.checkpoints import SAVED_AND_STOPPED

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "resumable.py"
LIMIT_S = 120
KILLS = 10
# The server that all tests' processes are forked from has these, so that not every one of them imports torch.
PRELOADED = ["torch", "torch._dynamo", "lockstep", "lockstep_tools.verify.runner", "torchmetrics.classification"]


@contextmanager
def training(folder: Path, out: Path, **arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that trains, and a connection on which it tells of every batch; killed at the end if it still runs.

    After the batch ``pause_at``, a pair of epoch and batch, it waits until something is sent to it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    hear, tell = context.Pipe()
    given = {"replicas": 2, "folder": str(folder), "out": str(out), "save_freq": 1, "tell": tell, **arguments}
    process = context.Process(
        target=runpy.run_path,
        args=(str(PROGRAM),),
        kwargs={"init_globals": {"ARGUMENTS": given}, "run_name": "__main__"},
    )
    process.start()
    tell.close()
    try:
        yield process, hear
    finally:
        process.kill()
        process.join()
        process.close()
        hear.close()


def told(hear: Connection) -> Any:
    """What the process tells next; None when it has ended."""
    assert hear.poll(LIMIT_S)
    try:
        return hear.recv()
    except (EOFError, OSError):
        return None


def ended(process: Any, within_s: float) -> bool:
    return bool(select.select([process.sentinel], [], [], within_s)[0])


def finish(folder: Path, out: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    with training(folder, out, **arguments) as (process, _):
        assert ended(process, LIMIT_S)
        process.join()
        assert process.exitcode == 0
    return read_weights(out)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_training_that_is_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path):
    undisturbed = finish(tmp_path / "none", tmp_path / "a.safetensors", save_freq=False)
    backup, moments = tmp_path / "backup", random.Random(4)
    killed = 0
    while killed < KILLS:
        with training(backup, tmp_path / "b.safetensors") as (process, hear):
            told(hear)  # the first batch is done, and its save begins
            if ended(process, moments.uniform(0.0, 0.1)):
                assert same(read_weights(tmp_path / "b.safetensors"), undisturbed)
                shutil.rmtree(backup)
                continue
            process.kill()
            process.join()
            killed += 1
        folder = CheckpointFolder(backup)
        assert [path for path, _ in folder.records()] == folder.paths()  # none that is seen is torn

    assert same(finish(backup, tmp_path / "b.safetensors"), undisturbed)
    assert [path.name for path in backup.iterdir()] == ["step-00000015"]


def test_sigterm_saves_and_ends_with_a_stated_code(tmp_path: Path):
    undisturbed = finish(tmp_path / "none", tmp_path / "a.safetensors", save_freq=False)
    with training(tmp_path / "backup", tmp_path / "b.safetensors", save_freq=False, pause_at=(1, 1)) as (process, hear):
        while told(hear) != (1, 1):
            pass
        os.kill(process.pid, signal.SIGTERM)
        hear.send("go on")
        heard = list(iter(lambda: told(hear), "exits"))
        os.kill(process.pid, signal.SIGTERM)  # as a launcher does that has heard of the first one late
        hear.send("go on")
        assert ended(process, LIMIT_S)
        process.join()
        assert process.exitcode == SAVED_AND_STOPPED == 75

    (path,) = CheckpointFolder(tmp_path / "backup").paths()
    done = [(1, 1), *heard][-1]
    assert path.name == f"step-{done[0] * 5 + done[1] + 1:08d}"
    assert not (tmp_path / "b.safetensors").exists()
    assert same(finish(tmp_path / "backup", tmp_path / "b.safetensors", save_freq=False), undisturbed)
