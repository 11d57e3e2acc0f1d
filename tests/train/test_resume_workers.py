"""Workers that are terminated or killed while they train, and those after them that go on: real processes over gloo.

Each worker is given a folder of its own for the backups, as on hosts without a shared file system: the chief's is the
one that is used.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.config import LogicalDevice
from lockstep.errors import ClusterError
from lockstep.strategies.mirrored import MirroredStrategy

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = str(Path(__file__).parent / "programs" / "resumable.py")
Result = tuple[dict[str, torch.Tensor], dict[str, list[float]]]


def job(program: str, folder: str, replicas: int, end: tuple[int, int] | None, number: int, exact: bool) -> Result:
    """One worker's life; at batch ``end`` worker 1 sends itself the signal ``number``."""
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
    strategy = ls.MultiWorkerMirroredStrategy(seed=1)
    index, resumable = strategy.workers.index, runpy.run_path(program)

    def hear(now: tuple[int, int]) -> None:
        if now == end and index == 1:
            os.kill(os.getpid(), number)

    backup = ls.BackupAndRestore(f"{folder}/{index}", save_freq=2, delete_checkpoint=False)
    kept = ls.ModelCheckpoint(f"{folder}/{index} kept", save_weights_only=False, keep=1, asynchronous=True)
    model, history = resumable["train"](strategy, [resumable["Tell"](hear), kept, backup], exact=exact)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    strategy.close()
    return state, history.history


def run(
    folder: Path, *, workers: int = 2, replicas: int = 2, end: Any = None, number: int = 0, exact: bool = False
) -> Result:
    return ls.launch(job, workers=workers, args=(PROGRAM, str(folder), replicas, end, number, exact), timeout_s=150)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def test_terminated_then_killed_then_finished_is_bit_equal_to_undisturbed(tmp_path: Path):
    expected, history = run(tmp_path / "undisturbed")
    assert names(tmp_path / "undisturbed") == ["0", "0 kept"]  # the chief alone writes
    assert names(tmp_path / "undisturbed" / "0 kept")[-1] == "step-00000015"

    with pytest.raises(ClusterError):
        run(tmp_path / "backup", end=(0, 2), number=signal.SIGTERM)
    assert names(tmp_path / "backup") == ["0"]
    saved = names(tmp_path / "backup" / "0")
    assert saved in (["step-00000004"], ["step-00000003"])  # both saved after the same batch, one after the signal

    with pytest.raises(ClusterError, match=r"worker 1"):
        run(tmp_path / "backup", end=(1, 3), number=signal.SIGKILL)
    assert names(tmp_path / "backup" / "0") == ["step-00000008"]

    state, record = run(tmp_path / "backup")
    assert far(state, expected) == 0
    assert record == history


@pytest.fixture
def mirrored(split_cpu: Callable[[int], tuple[LogicalDevice, ...]]) -> Any:
    """A function that trains on this process's replicas."""

    def train(replicas: int, callbacks: list[ls.Callback]) -> Result:
        strategy = MirroredStrategy(split_cpu(2)[:replicas], seed=1)
        try:
            model, history = runpy.run_path(PROGRAM)["train"](strategy, callbacks, exact=True)
        finally:
            strategy.close()
        return model.state_dict(), history.history

    return train


def test_on_another_number_of_workers_the_numbers_are_those_of_one_device(tmp_path: Path, mirrored: Any):
    expected, history = mirrored(1, [])
    with pytest.raises(ClusterError):
        run(tmp_path, end=(1, 2), number=signal.SIGKILL, exact=True)
    fewer, fewer_history = mirrored(1, [ls.BackupAndRestore(tmp_path / "0", save_freq=2, delete_checkpoint=False)])
    assert far(fewer, expected) < 1e-12
    assert fewer_history["loss"] == pytest.approx(history["loss"], rel=1e-12)
    assert fewer_history["accuracy"] == history["accuracy"]


def test_a_training_of_one_process_goes_on_on_two_workers(tmp_path: Path, mirrored: Any):
    class Failure(Exception):
        pass

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise Failure

    expected, history = mirrored(1, [])
    with pytest.raises(ls.errors.CallbackError, match="Failure"):
        mirrored(2, [ls.BackupAndRestore(tmp_path / "0", save_freq=2), ls.LambdaCallback(on_epoch_begin=fail)])

    state, record = run(tmp_path, replicas=1, exact=True)

    assert far(state, expected) < 1e-12
    assert record["val_loss"] == pytest.approx(history["val_loss"], rel=1e-12)
