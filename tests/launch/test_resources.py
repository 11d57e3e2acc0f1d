"""How the cores and GPUs of a host are divided among its workers."""

from __future__ import annotations

import json
import os

import pytest
import torch

import lockstep as ls
from lockstep.cluster.local import find_local_rank
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.launch.jobs import divide_host, visible_gpus


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 1, "1")])
def test_the_cores_are_divided(cores: int, workers: int, threads: str):
    shares = divide_host({}, workers=workers, cores=cores, gpus=(), gpus_per_worker=None)
    assert shares == ({"OMP_NUM_THREADS": threads},) * workers


def test_threads_that_the_user_has_set_stay():
    assert divide_host({"OMP_NUM_THREADS": "3"}, workers=2, cores=8, gpus=(), gpus_per_worker=None) == ({}, {})


@pytest.mark.parametrize(
    ("workers", "each", "expected"),
    [
        (4, None, ["4", "5", "6", "7"]),
        (2, None, ["4,5", "6,7"]),
        (3, None, ["4", "5", "6"]),
        (2, 1, ["4", "5"]),
        (8, 0, [""] * 8),
    ],
)
def test_each_gpu_is_at_one_worker_alone(workers: int, each: int | None, expected: list[str]):
    shares = divide_host({}, workers=workers, cores=8, gpus=("4", "5", "6", "7"), gpus_per_worker=each)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == expected
    assert {share.get("LOCAL_RANK") for share in shares} == {None if each == 0 else "0"}
    assert {share.get("LOCKSTEP_OWN_GPUS") for share in shares} == {None if each == 0 else "1"}


@pytest.mark.parametrize(("workers", "gpus"), [(2, ("4", "5", "6", "7")), (3, ("GPU-a", "GPU-b", "GPU-c"))])
def test_a_worker_takes_all_that_it_is_shown_and_no_two_take_one(workers: int, gpus: tuple[str, ...]):
    shares = divide_host({}, workers=workers, cores=8, gpus=gpus, gpus_per_worker=None)
    taken = []
    for worker, share in enumerate(shares):
        cluster = ClusterSpec(workers=("hosta:29500", *[""] * (workers - 1)), index=worker, source="torchrun")
        agents = {"LOCAL_RANK": str(worker), "LOCAL_WORLD_SIZE": str(workers)}
        shown = share["CUDA_VISIBLE_DEVICES"].split(",")
        taken += [shown[number] for number in find_local_rank({**agents, **share}, cluster).own_gpus(len(shown))]
    assert taken == list(gpus)


@pytest.mark.parametrize(
    ("workers", "each", "said"),
    [
        (3, None, "3 workers were given but there are 2 GPUs, expected one GPU for each"),
        (2, 2, "2 GPUs were given for each of 2 workers but there are 2 GPUs; start fewer workers"),
        (2, -1, "-1 GPUs were given for each of 2 workers"),
    ],
)
def test_too_few_gpus_are_refused(workers: int, each: int | None, said: str):
    with pytest.raises(ConfigError, match=said):
        divide_host({}, workers=workers, cores=8, gpus=("0", "1"), gpus_per_worker=each)


@pytest.mark.parametrize(
    ("environment", "present", "expected"),
    [
        ({}, 2, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "3, 5"}, 2, ("3", "5")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab12"}, 1, ("GPU-ab12",)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, ()),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, ()),
    ],
)
def test_the_gpus_that_may_be_used(environment: dict[str, str], present: int, expected: tuple[str, ...]):
    assert visible_gpus(environment, present) == expected


def told() -> list[list[str | None]]:
    """What each worker was shown of the host."""
    strategy = ls.MultiWorkerMirroredStrategy(communication=ls.CommunicationOptions(lost_after_s=60))
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCKSTEP_OWN_GPUS")
    own = json.dumps([os.environ.get(name) for name in names])
    every = strategy.workers.all_gather_bytes("what was shown", own.encode())
    strategy.close()
    return [json.loads(each) for each in every]


@pytest.mark.workers
def test_workers_are_started_with_their_own_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # what the launcher finds; the workers have none
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ls.launch(told, workers=2, timeout_s=100) == [["0,1", "0", "2", "1"], ["2,3", "0", "2", "1"]]
    assert ls.launch(told, workers=2, gpus_per_worker=0, timeout_s=100) == [["", "0", "2", None], ["", "1", "2", None]]
