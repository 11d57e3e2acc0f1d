"""The devices that a worker takes by itself, on machines that are only described, and the GPUs of all workers."""

from __future__ import annotations

import pytest
import torch

import lockstep as ls
from lockstep import config
from lockstep.config import DeviceRegistry, LogicalDeviceConfiguration, PhysicalDevice
from lockstep.errors import ClusterError
from lockstep.strategies import multi_worker
from lockstep.strategies.multi_worker import check_gpus, has_separate_gpus, worker_devices

CPU = torch.device("cpu")
TWO = ls.ClusterSpec(workers=("127.0.0.1:1", ""), index=1, source="torchrun")
NAMES = ("worker 0 (a:1)", "worker 1 (a:2)", "worker 2 (b:1)")


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> DeviceRegistry:
    described = [
        PhysicalDevice(name=f"gpu:{number}", kind="GPU", memory=8192, torch_device=torch.device("cuda", number))
        for number in range(gpus)
    ]
    cpu = PhysicalDevice(name="cpu:0", kind="CPU", memory=None, torch_device=CPU)
    registry = DeviceRegistry([cpu, *described])
    monkeypatch.setattr(config, "_registry", registry)
    return registry


def taken(monkeypatch: pytest.MonkeyPatch, cluster: ls.ClusterSpec | None = TWO, **variables: str) -> list[str]:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    return [device.name for device in worker_devices(cluster)]


@pytest.mark.parametrize(
    ("gpus", "expected"), [(0, ["cpu:0"]), (1, ["gpu:0"]), (2, ["gpu:1"]), (4, ["gpu:2", "gpu:3"])]
)
def test_the_part_of_a_worker_that_sees_all_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, expected: list[str]):
    machine(monkeypatch, gpus)
    assert taken(monkeypatch) == expected


def test_a_worker_of_lockstep_run_and_a_lone_process_take_all_that_they_see(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, 2)
    assert taken(monkeypatch, LOCAL_RANK="0", LOCKSTEP_OWN_GPUS="1") == ["gpu:0", "gpu:1"]
    assert taken(monkeypatch, None) == ["gpu:0", "gpu:1"]


def test_a_divided_gpu_is_taken_in_all_its_shares(monkeypatch: pytest.MonkeyPatch):
    registry = machine(monkeypatch, 2)
    registry.configure(registry.physical_devices("GPU")[1], [LogicalDeviceConfiguration(memory_limit=1024)] * 2)
    assert taken(monkeypatch) == ["gpu:1", "gpu:2"]


def test_variables_without_gpus_are_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, 0)
    assert taken(monkeypatch, LOCAL_RANK="none") == ["cpu:0"]


@pytest.mark.parametrize(
    ("gpus", "own"), [((7, 8, 9), True), ((7, 8, 7), False), ((7, 0, 9), False), ((0, 0, 0), False)]
)
def test_nccl_is_for_workers_with_a_gpu_each(gpus: tuple[int, ...], own: bool):
    assert has_separate_gpus(gpus) is own


def test_workers_of_a_divided_model_have_a_gpu_each_or_none():
    check_gpus(NAMES, (7, 8, 9))
    check_gpus(NAMES, (0, 0, 0))
    check_gpus((), ())


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ((7, 8, 7), r"3 workers have 2 GPUs.*; worker 0 \(a:1\), worker 2 \(b:1\) have not"),
        ((7, 7, 7), r"3 workers have 1 GPU,.*; worker 0 \(a:1\), worker 1 \(a:2\), worker 2 \(b:1\) have not"),
        ((7, 0, 9), r"3 workers have 2 GPUs.*; worker 1 \(a:2\) have not: .* device= on every worker"),
    ],
)
def test_others_are_refused_in_one_line(gpus: tuple[int, ...], said: str):
    with pytest.raises(ClusterError, match=said) as caught:
        check_gpus(NAMES, gpus)
    assert "\n" not in str(caught.value)


def on_one_gpu(told: str) -> str:
    """Both workers say that they have the same GPU."""
    multi_worker._gpu_id = lambda device: 7  # type: ignore[assignment]
    try:
        ls.ParallelStrategy(tensor=2, communication=ls.CommunicationOptions(lost_after_s=60))
    except ClusterError as error:
        return str(error)
    return told


@pytest.mark.workers
def test_two_workers_on_one_gpu_learn_of_it_before_nccl_does():
    said = ls.launch(on_one_gpu, workers=2, args=("nothing was refused",), timeout_s=100)
    assert said.startswith("2 workers have 1 GPU")
