"""The start of a job: who comes in which order, who is missing, who has no place in it, who disagrees."""

from __future__ import annotations

import multiprocessing.connection
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from tests.membership.conftest import MakeMembers, Member

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.membership import join
from lockstep.membership.store import OWNER_KEY
from lockstep.membership.worker_info import job_terms

Start = Callable[..., Member]

pytestmark = pytest.mark.workers

NOISE_S = 3.0
LISTENING = "0A"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_come_in_any_order_and_know_of_each_other(start: Start, addresses: list[str], order: tuple[int, ...]):
    job = [start({"workers": addresses, "index": index}, info={"replicas": index + 1}) for index in range(3)]
    for index in order:
        job[index].begin("join")
        if index != order[-1]:
            assert not job[index].has_answered(0.5)

    for index, member in enumerate(job):
        joined = member.answer().value
        assert joined["names"] == tuple(f"worker {i} ({address})" for i, address in enumerate(addresses))
        assert joined["infos"] == ({"replicas": 1}, {"replicas": 2}, {"replicas": 3})
        assert joined["address"] == f"127.0.0.{index + 1}"
    assert job[0].do("put", "a", "key", "of the chief") == "of the chief"
    assert job[1].do("put", "b", "key", "of the other group") == "of the other group"


def wait_until_served(address: str, limit_s: float = 30.0) -> None:
    host, port = address.split(":")
    pause, until = threading.Event(), time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((host, int(port)), limit_s).close()
        except ConnectionRefusedError:
            assert time.monotonic() < until, f"nobody listens at {address}"
            pause.wait(0.02)


@pytest.mark.slow
def test_those_who_are_missing_are_named_again_and_again_and_then_given_up(start: Start, addresses: list[str]):
    chief = start({"workers": addresses, "index": 0}, timeout_s=4.0).begin("join")
    other = start({"workers": addresses, "index": 1}, timeout_s=60.0).begin("join")
    said = chief.answer()
    assert said.error.startswith(f"worker 0 ({addresses[0]}) waited 4 s for worker 2 ({addresses[2]})")
    assert other.answer().error == said.error
    assert any(f"worker 0 ({addresses[0]}) waits for worker 2 ({addresses[2]}); " in line for line in chief.do("said"))
    assert any(f"worker 1 ({addresses[1]}) waits for worker 2 ({addresses[2]}); " in line for line in other.do("said"))


@pytest.mark.slow
def test_a_worker_whose_chief_is_missing_says_so(start: Start, addresses: list[str]):
    began = time.monotonic()
    worker = start({"workers": addresses, "index": 1}, timeout_s=3.0)
    said = worker.begin("join").answer()
    assert said.error.startswith(f"worker 1 ({addresses[1]}) waited 3 s for worker 0 ({addresses[0]})")
    assert f"{addresses[0]}: Connection refused" in said.error
    assert said.at_s - began < 3.0 + 3 * NOISE_S
    assert "waits for worker 0" in worker.do("said")[0]


@pytest.mark.slow
def test_a_chief_that_is_stopped_at_the_start_is_given_up(start: Start, addresses: list[str]):
    chief = start({"workers": addresses, "index": 0}).begin("join")
    first = start({"workers": addresses, "index": 1}, timeout_s=5.0).begin("join")
    wait_until_served(addresses[0])
    assert not first.has_answered(1.0)  # it waits for the third in the chief's store
    chief.send(signal.SIGSTOP)
    late = start({"workers": addresses, "index": 2}, timeout_s=3.0).begin("join")

    expected = f"s for an answer of the job's store at worker 0 ({addresses[0]}); its process is stopped or"
    assert expected in first.answer().error
    assert "worker 0" in late.answer().error


def test_a_process_of_another_job_is_refused_and_disturbs_nobody(start: Start, addresses: list[str]):
    chief = start({"workers": addresses[:2], "index": 0, "job_id": "roses"}, timeout_s=60.0).begin("join")
    stranger = start({"workers": addresses[:2], "index": 1, "job_id": "tulips"})
    error = stranger.begin("join").answer().error
    assert error.startswith(f"worker 1 ({addresses[1]}) belongs to job 'tulips'")
    assert f"but the store at {addresses[0]} belongs to job 'roses'" in error
    assert not chief.has_answered(2.5)
    worker = start({"workers": addresses[:2], "index": 1, "job_id": "roses"}).begin("join")
    assert chief.answer().error == worker.answer().error == ""


@pytest.mark.slow
@pytest.mark.parametrize("found", [b"\xff", b"no record", b"[]", b"{}"])
def test_the_store_of_another_program_is_told_from_one_of_ours(found: bytes, start: Start, addresses: list[str]):
    host, port = addresses[0].split(":")
    server = torch.distributed.TCPStore(host, int(port), None, True, wait_for_workers=False)
    server.set(OWNER_KEY, found)
    error = start({"workers": addresses[:2], "index": 1}).begin("join").answer().error
    assert "the job's store has what no worker writes" in error
    assert "choose another port" in error


@pytest.mark.slow
def test_a_second_process_of_a_worker_is_refused(start: Start, members: MakeMembers, addresses: list[str]):
    chief, first = members(2)
    error = start({"workers": addresses[:2], "index": 1}).begin("join").answer().error
    assert error.startswith(
        f"worker 1 ({addresses[1]}) is there already: process {first.pid} on {socket.gethostname()};"
    )
    assert "Give every process its own index" in error
    assert chief.do("wait", 1.0) == first.do("wait", 1.0) == "nothing happened"


@pytest.mark.slow
def test_two_processes_of_one_index_in_the_rendezvous(start: Start, addresses: list[str]):
    start({"workers": addresses, "index": 0}).begin("join")
    rivals = [start({"workers": addresses, "index": 1}).begin("join") for _ in range(2)]
    (refused,) = multiprocessing.connection.wait([rival.pipe for rival in rivals], NOISE_S * 10)
    refused, first = sorted(rivals, key=lambda rival: rival.pipe is not refused)
    assert f"is there already: process {first.pid} on" in refused.answer().error
    assert not first.has_answered(1.0)


@pytest.mark.slow
def test_a_worker_that_dies_in_the_rendezvous_is_replaced_by_its_next_process(start: Start, addresses: list[str]):
    chief = start({"workers": addresses, "index": 0}).begin("join")
    first = start({"workers": addresses, "index": 1}).begin("join")
    wait_until_served(addresses[0])
    assert not first.has_answered(1.0)
    first.end()
    job = [chief, *(start({"workers": addresses, "index": index}).begin("join") for index in (2, 1))]
    assert [member.answer().error for member in job] == ["", "", ""]
    assert [member.do("wait", 1.0) for member in job] == ["nothing happened"] * 3


@pytest.mark.slow
def test_a_chief_that_dies_in_the_rendezvous_is_replaced_by_its_next_process(start: Start, addresses: list[str]):
    first = start({"workers": addresses, "index": 0}).begin("join")
    worker = start({"workers": addresses, "index": 1}).begin("join")
    wait_until_served(addresses[0])
    assert not worker.has_answered(1.0)
    first.end()
    job = [worker, *(start({"workers": addresses, "index": index}).begin("join") for index in (0, 2))]
    assert [member.answer().error for member in job] == ["", "", ""]


@pytest.mark.slow
def test_an_interrupt_of_the_chief_ends_the_rendezvous_for_all(start: Start, addresses: list[str]):
    chief = start({"workers": addresses, "index": 0}).begin("join")
    worker = start({"workers": addresses, "index": 1}).begin("join")
    wait_until_served(addresses[0])
    assert not worker.has_answered(1.0)
    chief.send(signal.SIGINT)
    assert worker.answer().error == f"worker 0 ({addresses[0]}) was interrupted (Ctrl-C); it was in the rendezvous"


@pytest.mark.slow
def test_the_same_processes_can_form_the_job_again(members: MakeMembers):
    job = members(3)
    for member in job:
        member.do("close")
    for member in job:
        member.begin("join")
    assert [member.answer().error for member in job] == ["", "", ""]
    assert [member.do("wait", 1.0) for member in job] == ["nothing happened"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "term", "there"),
    [
        (("torch", "__version__", "2.1.7"), "torch", "2.1"),
        (("lockstep.membership.worker_info", "version", "0.0.1"), "lockstep", "0.0.1"),
    ],
)
def test_versions_that_disagree_end_all(
    start: Start, addresses: list[str], change: tuple[str, str, object], term: str, there: str
):
    job = [start({"workers": addresses, "index": index}) for index in range(3)]
    job[1].do("pretend", *change)
    here = job_terms(ClusterSpec(workers=addresses, index=0), 2.0)[term]
    for index in (0, 2):
        assert not job[index].begin("join").has_answered(0.5)
    job[1].begin("join")

    errors = {member.answer().error for member in job}

    assert len(errors) == 1
    error = errors.pop()
    assert f"disagree: {term} is " in error
    for workers, value in (("[02]", here), ("1", there)):  # 0 or 2 finds it first
        assert re.search(rf"\b{re.escape(value)} on worker {workers} \(", error)


@pytest.mark.slow
def test_another_number_of_workers_ends_all(start: Start, addresses: list[str]):
    job = [
        start({"workers": addresses[: 2 + index], "index": index, "job_id": "roses"}).begin("join") for index in (0, 1)
    ]
    errors = {member.answer().error for member in job}
    assert len(errors) == 1
    assert "number of workers is " in (error := errors.pop())
    assert "worker 0" in error
    assert "worker 1" in error


@pytest.mark.slow
def test_only_the_named_address_listens(members: MakeMembers, addresses: list[str]):
    members(2)
    port = int(addresses[0].split(":")[1])
    assert listeners_at(port) == {"127.0.0.1"}


def listeners_at(port: int) -> set[str]:
    """The addresses that something listens at, at this port of this machine."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, local_port = local.split(":")
            if state == LISTENING and int(local_port, 16) == port:
                raw = bytes.fromhex(address)
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, words))
    return found


@pytest.mark.slow
def test_noise_at_the_port_disturbs_nobody(start: Start, addresses: list[str]):
    host, port = addresses[0].split(":")
    job = [start({"workers": addresses[:2], "index": 0}).begin("join")]
    wait_until_served(addresses[0])
    assert not job[0].has_answered(1.0)
    with socket.create_connection((host, int(port))) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        job.append(start({"workers": addresses[:2], "index": 1}).begin("join"))

        assert [member.answer().error for member in job] == ["", ""]
        assert job[1].do("wait", 1.0) == "nothing happened"


@pytest.fixture
def launcher(free_port: int) -> Iterator[dict[str, object]]:
    """What a launcher that serves the store, in this process, tells three workers."""
    store = torch.distributed.TCPStore("127.0.0.1", free_port, None, True, timedelta(seconds=10), False)
    yield {
        "workers": [f"127.0.0.1:{free_port}", "", ""],
        "store_is_served": True,
        "job_id": "a-run",
        "source": "torchrun",
    }
    del store


@pytest.mark.slow
def test_workers_of_a_launcher_are_called_by_their_hosts(start: Start, launcher: dict[str, object]):
    # With a shorter limit, a store that answers late on a busy machine is taken for lost before the worker is.
    job = [start(launcher | {"index": index}, lost_after_s=6.0).begin("join") for index in range(3)]
    joined = [member.answer().value for member in job]

    host = socket.gethostname()
    assert joined[2]["names"] == (f"worker 0 ({launcher['workers'][0]})", f"worker 1 ({host})", f"worker 2 ({host})")
    assert [each["address"] for each in joined] == ["127.0.0.1"] * 3
    job[1].begin("wait", 30.0)
    job[0].send(signal.SIGKILL)
    assert "is lost: no heartbeat" in job[1].answer().error
    assert "is lost: no heartbeat" in job[2].error("wait", 30.0)


@pytest.mark.slow
def test_a_launcher_starts_the_job_again(start: Start, launcher: dict[str, object]):
    for attempt in (0, 0, 1):  # another run of the same attempt: the processes closed, or were killed and come anew
        job = [start(launcher | {"index": index, "attempt": attempt}).begin("join") for index in (2, 1, 0)]
        assert [member.answer().error for member in job] == ["", "", ""]
        assert [member.do("wait", 0.5) for member in job] == ["nothing happened"] * 3
        for member in job:
            member.end()


@pytest.mark.slow
def test_a_port_in_use_is_named(addresses: list[str]):
    host, port = addresses[0].split(":")
    expected = rf"worker 0 \({addresses[0]}\) cannot listen: port {port} of {host} is in use "
    with socket.create_server((host, int(port))) as server:
        with pytest.raises(ClusterError, match=expected):
            join(ClusterSpec(workers=addresses, index=0), timeout_s=0.5)
        assert server.fileno() >= 0


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_an_address_of_another_machine_is_named(start: Start, addresses: list[str], index: int):
    elsewhere = "198.51.100.7:20000"
    workers = [elsewhere, *addresses[1:]] if index == 0 else [addresses[0], elsewhere]
    if index:
        start({"workers": workers, "index": 0}).begin("join")
    with pytest.raises(
        ClusterError, match=r"worker . \(198.51.100.7:20000\) cannot listen: 198.51.100.7 is not an addr"
    ):
        join(ClusterSpec(workers=workers, index=index), timeout_s=20.0)
