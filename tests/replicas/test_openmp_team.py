"""The OpenMP team of a thread that calls run: gone before the replicas compute, and not ended over and over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.replicas.cpu import openmp_team
from lockstep.strategies.mirrored import MirroredStrategy

LARGE = 1 << 20
"""Elements that torch divides among all intra-op threads."""

needs_libgomp = pytest.mark.skipif(
    openmp_team._pause() is None, reason="torch has no libgomp here whose teams could be ended"
)


def native_threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def in_a_thread_with_two_cores(body: Callable[[], None]) -> None:
    """Calls ``body`` in a new thread, which has no team yet, where torch divides what is large in two."""
    before = torch.get_num_threads()
    errors: list[BaseException] = []

    def work() -> None:
        torch.get_num_threads()  # the thread's own number is set at the first look, and must not be later
        torch.set_num_threads(2)
        try:
            body()
        except BaseException as error:  # noqa: BLE001  raised again outside
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    if errors:
        raise errors[0]


def own_team() -> set[str]:
    """Makes the calling thread's team; gives its other threads."""
    before = native_threads()
    torch.ones(LARGE).add_(1)
    return native_threads() - before


@needs_libgomp
def test_a_run_ends_the_team_of_the_thread_that_asks_for_it(make_strategy: Callable[..., MirroredStrategy]):
    def body() -> None:
        strategy = make_strategy(1)
        mine = own_team()
        run = strategy.run(lambda: (native_threads(), torch.get_num_threads()))
        there, threads = strategy.local_results(run)[0]

        assert len(mine) == 1
        assert not mine & there
        assert threads == torch.get_num_threads() == 2  # neither has fewer threads than before

    in_a_thread_with_two_cores(body)


@needs_libgomp
def test_a_team_that_was_made_since_is_ended_by_a_later_run(make_strategy: Callable[..., MirroredStrategy]):
    def body() -> None:
        strategy = make_strategy(1)
        first = own_team()
        strategy.run(native_threads)
        second = own_team()
        there = strategy.local_results(strategy.run(native_threads))[0]

        assert len(first) == len(second) == 1
        assert not second & there

    in_a_thread_with_two_cores(body)


@needs_libgomp
def test_a_team_that_has_been_ended_is_made_again_where_it_is_needed():
    numbers = torch.arange(LARGE, dtype=torch.float32)

    def body() -> None:
        before = numbers.sum()
        openmp_team.end_openmp_team()
        assert len(own_team()) == 1
        assert torch.equal(numbers.sum(), before)

    in_a_thread_with_two_cores(body)


@needs_libgomp
def test_the_teams_of_other_threads_stay(make_strategy: Callable[..., MirroredStrategy]):
    def body() -> None:
        strategy = make_strategy(1)
        teams = [team for _ in range(2) for team in strategy.local_results(strategy.run(own_team))]
        assert [len(team) for team in teams] == [1, 0]  # the second run found the replica's team there
        assert teams[0] <= native_threads()

    in_a_thread_with_two_cores(body)


@needs_libgomp
def test_replicas_of_one_thread_each_leave_the_caller_s_team_alone(make_strategy: Callable[..., MirroredStrategy]):
    def body() -> None:
        strategy = make_strategy(2)
        mine = own_team()
        strategy.run(native_threads)
        assert mine <= native_threads()

    in_a_thread_with_two_cores(body)
