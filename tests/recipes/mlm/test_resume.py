"""A run of the recipe that is interrupted and begun again ends with the bits of one that was not, on every strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.recipes.conftest import MakeConfig

import lockstep as ls
from lockstep.config import LogicalDevice
from lockstep.errors import CheckpointError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.train import train_mlm

pytestmark = pytest.mark.slow

SplitCpu = Callable[[int], tuple[LogicalDevice, ...]]
EVERY, INTERRUPTED = 6, 14  # global batches, of which an epoch has 8: saved last in the middle of the second
DONE = [8, 4]  # batches of each epoch that the resumed run has on its clock: of the second its own half


@pytest.fixture
def config(tiny: MakeConfig) -> MlmConfig:
    return tiny(epochs=2, layers=2, dropout=0.1)


def thrice(config: MlmConfig, make: Callable[[], ls.Strategy], folder: Path) -> list[dict[str, Any]]:
    """A run without interruption, one that is interrupted, which is left out, and one that goes on from there."""

    def stop(batch: int, logs: Any) -> None:
        seen.append(batch)
        if len(seen) == INTERRUPTED:
            raise KeyboardInterrupt

    seen: list[int] = []
    backup = partial(ls.BackupAndRestore, folder / "backup", save_freq=EVERY)
    stopping = [ls.LambdaCallback(on_train_batch_end=stop), backup()]
    found = []
    for name, callbacks in {"undisturbed": [], "interrupted": stopping, "resumed": [backup()]}.items():
        with closing(make()) as strategy, suppress(KeyboardInterrupt):
            result = train_mlm(config, strategy, callbacks=callbacks, output_dir=folder / name, verbose=0)
            found.append(
                {
                    "history": result.history.history,
                    "test": result.test_metrics,
                    "batches": [timing.steps for timing in result.history.timing],
                }
            )
    return found


def bits(folder: Path, name: str) -> bytes:
    return (folder / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("order", ["grouped", "published"])
def test_replicas_go_on_at_the_very_sample(order: Any, config: MlmConfig, split_cpu: SplitCpu, tmp_path: Path):
    devices, config = list(split_cpu(2)), replace(config, order=order)
    undisturbed, resumed = thrice(config, lambda: MirroredStrategy(devices, seed=0), tmp_path)
    assert resumed["history"] == undisturbed["history"]
    assert resumed["test"] == undisturbed["test"]
    assert resumed["batches"] == DONE
    assert bits(tmp_path, "resumed") == bits(tmp_path, "undisturbed")
    assert not (tmp_path / "backup").exists()
    assert not (tmp_path / "interrupted").exists()


def test_a_backup_of_other_settings_is_refused(config: MlmConfig, split_cpu: SplitCpu, tmp_path: Path):
    kept = ls.BackupAndRestore(tmp_path, delete_checkpoint=False)
    with closing(MirroredStrategy(list(split_cpu(2)), seed=0)) as strategy:
        train_mlm(replace(config, epochs=1), strategy, callbacks=[kept], verbose=0)
        with pytest.raises(
            CheckpointError, match=r"of a run with batch_size=13, epochs=1, .* has batch_size=9, epochs=2"
        ):
            train_mlm(replace(config, epochs=2, batch_size=9), strategy, callbacks=[kept], verbose=0)
        with pytest.raises(CheckpointError, match="of a run with hidden=16, and this run has hidden=32; resume"):
            train_mlm(replace(config, epochs=1, hidden=32), strategy, callbacks=[kept], verbose=0)


def on_workers(config: MlmConfig, folder: Path, tensor: int) -> list[dict[str, Any]]:
    """In every worker: on replicas of the whole model, or on parts of it."""
    import torch

    torch.set_num_threads(1)
    make = (
        partial(ls.MultiWorkerMirroredStrategy, ["cpu:0"])
        if tensor == 0
        else partial(ls.ParallelStrategy, tensor=tensor)
    )
    return thrice(config, partial(make, seed=0), folder)


@pytest.mark.workers
@pytest.mark.parametrize(("tensor", "order"), [(0, "published"), (2, "grouped")])
def test_workers_go_on_at_the_very_sample(tensor: int, order: Any, config: MlmConfig, tmp_path: Path):
    config = replace(config, order=order)
    job = partial(_called, str(Path(__file__)))
    undisturbed, resumed = ls.launch(job, workers=2, args=(config, tmp_path, tensor), timeout_s=250)
    assert resumed["history"] == undisturbed["history"]
    assert resumed["test"] == undisturbed["test"]
    assert resumed["batches"] == DONE
    assert bits(tmp_path, "resumed") == bits(tmp_path, "undisturbed")


def _called(path: str, *args: Any) -> list[dict[str, Any]]:
    """Runs ``on_workers`` of this file, which no worker could import by name."""
    import runpy

    found: list[dict[str, Any]] = runpy.run_path(path, run_name="resume")["on_workers"](*args)
    return found
