"""The cores of a host among its workers, as numbers."""

from __future__ import annotations

import pytest

from lockstep.cluster.local import count_core_sharers, threads_per_worker

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
