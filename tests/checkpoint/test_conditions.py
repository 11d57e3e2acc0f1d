"""What the bits depend on: it is in each checkpoint, and one line says which of it has changed on resuming."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.config import LogicalDevice
from lockstep.errors import ClusterError, ConfigError
from lockstep.replicas import conditions
from lockstep.strategies.base import place_replicas
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import compare_machines


def save(strategy: ls.Strategy, folder: Path, **settings: str) -> dict[str, str]:
    """The conditions in the record of a new checkpoint."""
    checkpoint = ls.Checkpoint(model=strategy.mirror(nn.Linear(2, 1)))  # type: ignore[arg-type]
    checkpoint.settings.update(settings)
    path = ls.CheckpointManager(checkpoint, folder).save(1)
    found: dict[str, str] = json.loads((path / "checkpoint.json").read_text())["conditions"]
    return found


def restore(strategy: ls.Strategy, folder: Path, **settings: str) -> None:
    checkpoint = ls.Checkpoint(model=strategy.mirror(nn.Linear(2, 1)))  # type: ignore[arg-type]
    checkpoint.settings.update(settings)
    checkpoint.restore(folder)


def test_the_record_names_devices_libraries_threads_replicas_and_seed(make_strategy: MakeStrategy, tmp_path: Path):
    found = save(make_strategy(2, seed=7), tmp_path, precision="bf16")
    assert found["device"] == conditions.processor_name()
    assert found["torch"] == torch.__version__
    assert found["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    assert (found["replicas"], found["replicas of each worker"], found["seed"]) == ("2", "2", "7")
    assert found["threads per replica"].isdigit()
    assert found["precision"] == "bf16"


def test_on_the_same_machine_nothing_is_said(
    make_strategy: MakeStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(make_strategy(2, seed=7), tmp_path)
    restore(make_strategy(2, seed=8), tmp_path)  # the random numbers that were saved go on
    assert caplog.messages == []


def test_what_has_changed_is_told_in_one_line(
    make_strategy: MakeStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    save(make_strategy(2), tmp_path, precision="fp32")
    monkeypatch.setattr(conditions, "processor_name", lambda: "Another Processor 9")
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        restore(make_strategy(2), tmp_path, precision="bf16")

    (line,) = caplog.messages
    assert "is Another Processor 9" in line
    assert "precision was fp32, is bf16" in line
    assert "torch was" not in line
    assert "bits" in line
    assert "\n" not in line


def test_another_number_of_replicas_is_exact_to_rounding_and_said_so(
    make_strategy: MakeStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(make_strategy(2), tmp_path)
    restore(make_strategy(3), tmp_path)
    (line,) = caplog.messages
    assert "replicas was 2, is 3" in line
    assert "rounding" in line


def test_given_replicas_may_move_to_other_devices(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    devices = split_cpu(3)
    with closing(MirroredStrategy(devices, replicas=3, seed=0)) as strategy:
        assert "replicas of each worker" not in save(strategy, tmp_path)
    with closing(MirroredStrategy(devices[:1], replicas=3, seed=0)) as strategy:
        restore(strategy, tmp_path)
    assert caplog.messages == []


def test_a_model_records_its_precision(make_strategy: MakeStrategy):
    net = nn.Linear(2, 1)
    with make_strategy(2).scope():
        model = ls.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), 0.1), nn.MSELoss(), precision="bf16")
    assert model.checkpoint().settings == {"precision": "bf16"}


# ---- workers that compare their machines


NAMES = ["worker 0 (a:1)", "worker 1 (b:1)", "worker 2 (c:1)"]


def test_workers_with_other_kinds_of_devices_are_refused_by_name():
    with pytest.raises(ClusterError, match=r"worker 0 \(a:1\) computes on a CPU and worker 2 \(c:1\) on a GPU"):
        compare_machines(NAMES, ["CPU", "CPU", "GPU"], [{}] * 3)


def test_workers_with_other_processors_are_named_and_equal_ones_are_not():
    first, other = {"device": "X", "torch": "2.13"}, {"device": "Y", "torch": "2.13"}
    warning = compare_machines(NAMES, ["CPU"] * 3, [first, first, other])
    assert "device (X, Y)" in warning
    assert "worker 2" in warning
    assert "torch" not in warning
    assert compare_machines(NAMES, ["CPU"] * 3, [first] * 3) == ""


def test_replicas_on_devices_of_two_kinds_are_refused():
    devices: Any = [SimpleNamespace(kind="CPU", name="cpu:0"), SimpleNamespace(kind="GPU", name="gpu:0")]
    with pytest.raises(ConfigError, match=r"cpu:0 and gpu:0"):
        place_replicas(4, devices)


def job() -> list[list[str]]:
    """What each of two workers logs while it makes its strategy; worker 1 has another processor than the chief."""
    if os.environ["RANK"] == "1":
        conditions.processor_name = lambda: "Another Processor 9"  # type: ignore[assignment]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    with closing(ls.MultiWorkerMirroredStrategy(["cpu:0"], replicas=2, seed=0)) as strategy:
        return all_gather_object(strategy.workers, "what was logged", lines)


@pytest.mark.workers
def test_the_chief_says_which_worker_has_another_processor():
    chief, other = ls.launch(job, workers=2, timeout_s=150)
    (line,) = [line for line in chief if "Another Processor 9" in line]
    assert "worker 1" in line
    assert not any("Processor" in line for line in other)
