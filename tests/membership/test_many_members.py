"""Jobs of hundreds of members: all meet, all learn of a loss, and what a beat costs a member stays the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.membership.conftest import Member
from torch.distributed import HashStore

from lockstep.cluster.spec import ClusterSpec
from lockstep.membership.heartbeat import HeartbeatMonitor
from lockstep.membership.rendezvous import join_names
from lockstep.membership.store import StoreClient, StoreKeys
from lockstep.membership.worker_info import WorkerInfo, infos_from_text, infos_to_text

LOST_AFTER_S = 6.0
NOISE_S = 9.0


@pytest.mark.slow
@pytest.mark.workers
def test_256_members_meet_and_all_are_told_of_a_loss(start: Callable[..., Member], free_port: int):
    # Members in a process share its threads' lock and this machine's cores, which a job's members do not.
    spec = {"workers": [f"127.0.0.1:{free_port}", *[""] * 255]}
    job = [start(spec, timeout_s=60.0, lost_after_s=LOST_AFTER_S) for _ in range(4)]
    chief, first, second, lost = job
    chief.do("limit_files", 128)  # fewer than there will be connections
    for member, ranks in zip(job, ([0], range(1, 128), range(128, 255), [255]), strict=True):
        member.begin("join_as", ranks)
    assert [member.answer().error for member in job] == ["", "", "", ""]

    at_s = lost.send(signal.SIGKILL)

    told = [member.begin("told") for member in (chief, first, second)]
    answers = [member.answer() for member in told]
    assert [len(said.value) for said in answers] == [1, 127, 127]
    (error,) = {text for said in answers for text in said.value}
    assert error.startswith("worker 255 (")
    assert "is lost: no heartbeat" in error
    assert max(said.at_s for said in answers) - at_s < LOST_AFTER_S + NOISE_S
    for member in told:
        member.begin("close_all")
    assert [member.answer().error for member in told] == ["", "", ""]


class CountingStore:
    """A store that counts the keys that are read, and tells when a few beats have been made."""

    def __init__(self) -> None:
        self.store, self.read, self.beats, self.beaten = HashStore(), set[int](), 0, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read.add(len(keys))
        self.beats += 1
        if self.beats == 3:
            self.beaten.set()
        return self.store.multi_get(keys)


@pytest.mark.parametrize(("rank", "expected"), [(0, 2 + 1023), (1, 2 + 1), (1023, 2 + 1)])
def test_only_the_chief_reads_every_heartbeat(rank: int, expected: int):
    spec = ClusterSpec(workers=["127.0.0.1:1", *[""] * 1023], index=rank)
    keys, store = StoreKeys(spec, "1"), CountingStore()
    keys.open(store, "")  # type: ignore[arg-type]
    for other in range(1, 1024):
        keys.register(store, other, "")  # type: ignore[arg-type]
    names = [f"worker {index}" for index in range(1024)]
    monitor = HeartbeatMonitor(StoreClient(lambda: store), keys, names, rank, lost_after_s=1.5, launcher="a launcher")  # type: ignore[arg-type, return-value]

    assert store.beaten.wait(30.0)

    monitor.close()
    assert store.read == {expected}
    assert monitor.job.failure is None


def test_what_is_equal_for_all_takes_no_room():
    infos = tuple(
        WorkerInfo(
            rank=rank,
            host=f"node{rank // 8:04d}",
            pid=4000 + 37 * rank % 1009,
            address=f"10.1.{rank // 8 // 250}.{rank // 8 % 250}",
            token=f"{rank:016x}",
            info={"replicas": 1, "gpu": rank % 8, "host": 2**40 + rank // 8, "cores": 2**128 - 1},
            terms={"workers": "a" * 300},
        )
        for rank in range(1024)
    )

    text = infos_to_text(infos)

    assert len(text) < 40 * 1024
    assert [(info.rank, info.host, info.address, info.info) for info in infos_from_text(text)] == [
        (info.rank, info.host, info.address, info.info) for info in infos
    ]


def test_of_many_names_the_first_are_shown():
    names = [f"worker {index}" for index in range(1000)]
    assert join_names(names[:2]) == "worker 0, worker 1"
    assert join_names(names).startswith("worker 0, worker 1, ")
    assert join_names(names).endswith(" and 992 more")
    assert join_names([]) == ""
