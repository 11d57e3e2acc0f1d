"""``lockstep run --workers MIN:MAX``: workers and hosts are lost and come back, by real signals to real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Start
from tests.conftest import FreePorts

pytestmark = pytest.mark.workers

LIMIT_S = 60
NEVER = ("--rejoin-s", "600")
READY = (Path(__file__).parent / "programs" / "ready.py").read_text()


class Job:
    """A launcher whose workers say who they are.

    Attributes:
        pids: of the workers of the round, by rank.
        threads: of each of them.
        round: its number.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: dict[int, int] = {}
        self.threads: set[str] = set()
        self.round = -1

    def wait(self, *, total: int, own: int | None = None) -> None:
        """Waits until ``own`` workers of a new round with ``total`` are there, and ends the launcher if none come."""
        limit = threading.Timer(LIMIT_S, self.process.kill)
        limit.start()
        try:
            self._read(total, total if own is None else own)
        finally:
            limit.cancel()

    def _read(self, total: int, own: int) -> None:
        before, self.pids = self.round, {}
        while len(self.pids) < own:
            line = self.process.stdout.readline()
            assert line, f"{len(self.pids)} of {own} workers came; " + self.process.communicate(timeout=LIMIT_S)[1]
            _, ready, pid, rank, world, number, threads = line.split()
            if (ready, int(world)) != ("ready", total) or int(number) <= before:
                continue  # of a round between
            self.pids[int(rank)], self.round = int(pid), int(number)
            self.threads.add(threads)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def end(self) -> tuple[int, list[str]]:
        """The exit code, and what the launcher has said after its first line."""
        said = self.process.communicate(timeout=LIMIT_S)[1].splitlines()
        return self.process.returncode, [line for line in said if line.startswith("lockstep: ")][1:]


@pytest.fixture
def start_job(start_lockstep: Start, write) -> Callable[..., Job]:
    """``start_job("1:3", ...)``: workers that say who they are, and what they are given."""
    program = write(READY)

    def start(workers: str, *flags: str, saves: bool = False) -> Job:
        words = ["run", "--workers", workers, "--output", "all", *flags, program]
        return Job(start_lockstep(*words, *(["saves"] if saves else [])))

    return start


def ends(pid: int) -> bool:
    """Whether a process ends within the limit, or has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = bool(select.select([handle], [], [], LIMIT_S)[0])
    os.close(handle)
    return ended


def test_those_that_are_left_go_on_and_lost_ones_come_back(start_job: Callable[..., Job]):
    job = start_job("1:3", "--rejoin-s", "1", saves=True)
    job.wait(total=3)

    job.kill(1)
    job.wait(total=2)
    survivors = dict(job.pids)
    job.wait(total=3)

    assert sorted(job.pids) == [0, 1, 2]
    assert len(job.threads) == 1  # also of those that were left: results depend on it
    assert all(ends(pid) for pid in survivors.values())
    for rank in range(3):
        job.kill(rank, signal.SIGUSR1)
    code, said = job.end()
    assert code == 0
    assert said == [
        "lockstep: worker 1 was killed by SIGKILL; 2 workers go on",
        "lockstep: 1 lost worker is back; 3 workers go on",
    ]


@pytest.mark.slow
def test_a_stopped_worker_is_ended_with_the_round_in_which_it_is_found(start_job: Callable[..., Job]):
    job = start_job("1:3", *NEVER)
    job.wait(total=3)
    stopped = job.pids[0]

    job.kill(0, signal.SIGSTOP)
    job.kill(2)
    job.wait(total=1)

    assert ends(stopped)
    job.kill(0, signal.SIGUSR1)
    code, (said,) = job.end()
    assert (code, said) == (0, "lockstep: worker 2 was killed by SIGKILL; worker 0 was stopped; 1 worker goes on")


@pytest.mark.slow
def test_fewer_than_the_minimum_end_the_job_once_the_restarts_are_used_up(start_job: Callable[..., Job]):
    job = start_job("2:2", *NEVER, "--max-restarts", "1")
    job.wait(total=2)

    job.kill(1)
    job.wait(total=2)
    assert job.round == 1
    job.kill(0)

    code, said = job.end()
    assert code == 137
    assert said[:2] == [
        "lockstep: worker 1 was killed by SIGKILL; 1 left of at least 2; starting all again (1 of 1)",
        "lockstep: worker 0 was killed by SIGKILL; 1 left of at least 2",
    ]
    assert said[2].startswith("lockstep: error: worker 0 of 2 was killed by SIGKILL; its log is ")


def test_a_failure_of_the_program_is_no_loss(start_job: Callable[..., Job]):
    job = start_job("1:3", *NEVER, "--max-restarts", "1")
    job.wait(total=3)

    job.kill(1, signal.SIGUSR2)
    job.wait(total=3)
    job.kill(2, signal.SIGUSR2)

    code, said = job.end()
    assert code == 1
    assert said[0] == "lockstep: worker 1 of 3 failed: SystemExit: no data; starting all again (1 of 1)"
    assert said[-1].startswith("lockstep: error: worker 2 of 3 failed: SystemExit: no data; its log is ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 75)]
)
def test_the_workers_of_a_later_round_end_with_the_launcher(sign, code: int, start_job: Callable[..., Job]):
    job = start_job("1:3", *NEVER, saves=True)
    job.wait(total=3)
    job.kill(2)
    job.wait(total=2)
    own = dict(job.pids)
    job.process.send_signal(sign)
    assert job.end()[0] == code
    assert all(ends(pid) for pid in own.values())


@pytest.fixture
def hosts(free_ports: FreePorts) -> str:
    """Two addresses of this machine with a port at which nobody listens."""
    (port,) = free_ports(1)
    return f"127.0.0.1:{port},127.0.0.2:{port}"


@pytest.mark.slow
def test_a_host_is_lost_and_comes_back(start_job: Callable[..., Job], hosts: str):
    flags = ("--rejoin-s", "1", "--hosts", hosts, "--index")
    first, second = (start_job("1:2", *flags, index, saves=True) for index in "01")
    for job in (first, second):
        job.wait(total=4, own=2)
    assert (sorted(first.pids), sorted(second.pids)) == ([0, 1], [2, 3])

    second.process.kill()
    # Programs with Lockstep notice it by themselves, and fail:
    assert all(ends(pid) for pid in second.pids.values())
    first.kill(1, signal.SIGUSR2)
    first.wait(total=2)
    again = start_job("1:2", *flags, "1", saves=True)
    for job in (first, again):
        job.wait(total=4, own=2)

    # The round of the three that are left may be over before all of them have said who they are.
    again.kill(2)  # on the other host
    for job in (first, again):
        job.wait(total=4, own=2)
    assert first.round == again.round
    for job in (first, again):
        for rank in job.pids:
            job.kill(rank, signal.SIGUSR1)
    name = hosts.split(",")[1]
    assert first.end() == (
        0,
        [
            f"lockstep: host 1 ({name}) is gone; 2 workers go on",
            f"lockstep: host 1 ({name}) has joined; 4 workers go on",
            "lockstep: worker 2 was killed by SIGKILL; 3 workers go on",
            "lockstep: 1 lost worker is back; 4 workers go on",
        ],
    )
    assert again.end()[0] == 0


@pytest.mark.slow
def test_the_others_go_on_without_a_host_that_is_told_to_end_and_end_with_the_first(
    start_job: Callable[..., Job], hosts: str
):
    flags = (*NEVER, "--hosts", hosts, "--index")
    first, second = (start_job("1:1", *flags, index, saves=True) for index in "01")
    for job in (first, second):
        job.wait(total=2, own=1)

    second.process.terminate()
    assert second.end()[0] == 75
    first.wait(total=1)
    first.process.terminate()

    name = hosts.split(",")[1]
    assert first.end() == (75, [f"lockstep: host 1 ({name}) is gone; 1 worker goes on"])


@pytest.mark.slow
def test_the_job_ends_with_its_first_host(start_job: Callable[..., Job], hosts: str):
    flags = (*NEVER, "--hosts", hosts, "--index")
    first, second = (start_job("1:1", *flags, index) for index in "01")
    for job in (first, second):
        job.wait(total=2, own=1)

    first.process.kill()
    second.kill(1, signal.SIGUSR2)  # as programs with Lockstep end then

    code, said = second.end()
    assert code == 1
    assert "host 0 (127.0.0.1:" in said[-1]
    assert "which serves the job's store, is lost" in said[-1]


@pytest.mark.slow
def test_a_launcher_of_another_job_is_refused(start_job: Callable[..., Job], hosts: str):
    first = start_job("1:2", *NEVER, "--hosts", hosts, "--index", "0")
    stray = start_job("2:2", *NEVER, "--hosts", hosts, "--index", "1")
    _, said = stray.process.communicate(timeout=LIMIT_S)
    assert (stray.process.returncode, said.count("\n")) == (1, 1)
    assert "belongs to" in said
    first.process.kill()
