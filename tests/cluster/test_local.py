"""Which GPUs of its host are a worker's own, and how the cores are divided among the workers."""

from __future__ import annotations

import pytest

from lockstep.cluster.local import LocalRank, count_core_sharers, find_local_rank, threads_per_worker
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

FOUR = ("hosta:29500", "", "", "")


def torchrun(index: int = 1, **more: str) -> tuple[dict[str, str], ClusterSpec]:
    return {"LOCAL_RANK": str(index % 2), "LOCAL_WORLD_SIZE": "2", **more}, ClusterSpec(
        workers=FOUR, index=index, source="torchrun"
    )


def slurm(**variables: str) -> tuple[dict[str, str], ClusterSpec]:
    return variables, ClusterSpec(workers=FOUR, index=3, source="SLURM")


def named(index: int, **variables: str) -> tuple[dict[str, str], ClusterSpec]:
    return variables, ClusterSpec(workers=("hosta:1", "hostb:1", "hosta:2", "hostb:2"), index=index)


ALONE = LocalRank()
PLACES = {
    "one process": (({}, None), ALONE),
    "one worker": (({}, ClusterSpec(workers=("",), index=0)), ALONE),
    "an evaluator": (({}, ClusterSpec(workers=("hosta:1", "hosta:2"), index=0, task="evaluator")), ALONE),
    "torchrun": (torchrun(3), LocalRank(rank=1, workers=2)),
    "torchrun's variables by hand": (({}, ClusterSpec(workers=FOUR, index=3, source="torchrun")), ALONE),
    "lockstep run": (torchrun(2, LOCKSTEP_OWN_GPUS="1"), LocalRank(rank=0, workers=2, sees_own=True)),
    "srun": (
        slurm(SLURM_LOCALID="1", SLURM_NODEID="1", SLURM_STEP_TASKS_PER_NODE="1(x1),3"),
        LocalRank(rank=1, workers=3),
    ),
    "srun --gpus-per-task": (
        slurm(SLURM_LOCALID="1", SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_GPUS_PER_TASK="1"),
        LocalRank(rank=1, workers=2, sees_own=True),
    ),
    "srun --tres-per-task": (
        slurm(SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_TRES_PER_TASK="cpu:2"),
        LocalRank(rank=0, workers=2),
    ),
    "an old srun": (slurm(SLURM_LOCALID="1"), ALONE),
    "the third of TF_CONFIG": (named(2), LocalRank(rank=1, workers=2)),
    "the second of TF_CONFIG": (named(1), LocalRank(rank=0, workers=2)),
    "started by hand": (named(1, CUDA_VISIBLE_DEVICES="2,3"), LocalRank(rank=0, workers=2, sees_own=True)),
}


@pytest.mark.parametrize("case", PLACES)
def test_the_place_among_the_workers_of_a_host(case: str):
    (environment, cluster), expected = PLACES[case]
    assert find_local_rank(environment, cluster) == expected


@pytest.mark.parametrize(
    ("place", "gpus", "expected"),
    [
        (ALONE, 4, [0, 1, 2, 3]),
        (ALONE, 0, []),
        (LocalRank(rank=1, workers=2), 4, [2, 3]),
        (LocalRank(rank=2, workers=3), 4, [2]),
        (LocalRank(rank=3, workers=4), 4, [3]),
        (LocalRank(rank=3, workers=4), 1, [0]),  # each sees another one, as with --virtual-local-rank
        (LocalRank(rank=3, workers=4), 2, [1]),
        (LocalRank(rank=0, workers=4, sees_own=True), 2, [0, 1]),
        (LocalRank(rank=1, workers=2), 0, []),
    ],
)
def test_a_worker_s_own_gpus(place: LocalRank, gpus: int, expected: list[int]):
    assert list(place.own_gpus(gpus)) == expected


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_no_two_workers_have_one_gpu_where_there_are_enough(workers: int):
    parts = [LocalRank(rank=index, workers=workers).own_gpus(8) for index in range(workers)]
    assert len({gpu for part in parts for gpu in part}) == sum(map(len, parts))
    assert len({len(part) for part in parts}) == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (torchrun(1, LOCAL_RANK="2"), "torchrun: LOCAL_RANK='2'; it must be a whole number from 0 to 1"),
        (slurm(SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="two"), "SLURM_STEP_TASKS_PER_NODE='two' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(environment: tuple[dict[str, str], ClusterSpec], said: str):
    with pytest.raises(ClusterError, match=said):
        find_local_rank(*environment)


ALL, LOW, HIGH = 0b1111, 0b0011, 0b1100


@pytest.mark.parametrize(
    ("cards", "sharing"),
    [
        ([(1, ALL)], [1]),
        ([(1, ALL), (1, ALL)], [2, 2]),
        ([(1, ALL), (2, ALL), (1, ALL)], [2, 1, 2]),
        ([(1, LOW), (1, HIGH)], [1, 1]),  # bound by who started them
        ([(1, LOW), (1, LOW), (1, HIGH)], [2, 2, 1]),
    ],
)
def test_who_shares_the_cores_of_a_worker(cards: list[tuple[int, int]], sharing: list[int]):
    told = [{"host": host, "cores": cores} for host, cores in cards]
    assert [count_core_sharers(told, index) for index in range(len(told))] == sharing


@pytest.mark.parametrize(
    ("environment", "threads", "workers", "expected"),
    [
        ({}, 8, 2, 4),
        ({}, 8, 3, 2),
        ({}, 8, 20, 1),
        ({}, 8, 1, 8),
        ({}, 4, 2, 4),  # torch.set_num_threads
        ({"OMP_NUM_THREADS": "8"}, 8, 2, 8),
    ],
)
def test_the_threads_of_a_worker(environment: dict[str, str], threads: int, workers: int, expected: int):
    assert threads_per_worker(environment, threads=threads, default=8, workers=workers) == expected
