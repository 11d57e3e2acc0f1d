"""Calls to a store that is gone or does not answer: the caller goes on. And calls that are watched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from lockstep.errors import ClusterError
from lockstep.membership.membership import run_with_watchdog
from lockstep.membership.store import StoreBrokenError, StoreClient, StoreSilentError, listen


@pytest.fixture
def client() -> Iterator[StoreClient]:
    client = StoreClient(HashStore)
    yield client
    client.close()


def test_calls_are_made_in_order_in_one_thread(client: StoreClient):
    names = [client.submit(lambda store: threading.current_thread().name) for _ in range(3)]
    client.submit(lambda store: store.set("key", "1"))
    client.submit(lambda store: store.set("key", "2"))
    assert client.call(lambda store: store.get("key"), 5.0) == b"2"
    assert {name.result(5.0) for name in names} == {"lockstep-store"}


def test_a_call_that_takes_too_long_is_silence_and_is_made_all_the_same(client: StoreClient):
    go_on = threading.Event()
    client.submit(lambda store: go_on.wait(20.0))
    with pytest.raises(StoreSilentError, match=r"no answer within 0\.05 s"):
        client.call(lambda store: store.set("key", "late"), 0.05)
    go_on.set()
    assert client.call(lambda store: store.get("key"), 5.0) == b"late"


def test_a_store_that_is_gone_is_broken(free_port: int):
    server = TCPStore("127.0.0.1", free_port, None, True, timedelta(seconds=5), False)
    client = StoreClient(lambda: TCPStore("127.0.0.1", free_port, None, False, timedelta(seconds=5), False))
    assert client.call(lambda store: store.compare_set("key", "", "1"), 5.0) == b"1"
    del server
    with pytest.raises(StoreBrokenError, match=r"^[^\n]+$"):
        client.call(lambda store: store.compare_set("key", "", "1"), 5.0)
    client.close()


def test_errors_of_ours_come_as_they_are(client: StoreClient):
    def refuse(store: object) -> None:
        raise ClusterError("another job's")

    with pytest.raises(ClusterError, match="another job's"):
        client.call(refuse, 5.0)


def test_a_watched_call_gives_what_it_returns_or_raises():
    def fail() -> None:
        raise TimeoutError("its own")

    assert run_with_watchdog(lambda: 3, lambda: None) == 3
    with pytest.raises(TimeoutError, match="its own"):
        run_with_watchdog(fail, lambda: None)


def test_a_watched_call_is_left_when_the_job_ends():
    hanging = threading.Event()

    def check() -> None:
        raise ClusterError("worker 1 is lost")

    try:
        with pytest.raises(ClusterError, match="worker 1 is lost"):
            run_with_watchdog(lambda: hanging.wait(60.0), check)
    finally:
        hanging.set()


@pytest.mark.parametrize("host", ["0x0", "0", "0.0", "::ffff:0.0.0.0", "::", "0.0.0.0"])
def test_a_host_that_means_every_address_of_the_machine_is_refused_however_it_is_written(host: str):
    with pytest.raises(ClusterError, match="every address") as refused:
        listen(host, 0, "worker 0").close()
    assert repr(host) in str(refused.value)


def test_one_address_of_this_machine_is_listened_on():
    with listen("127.0.0.1", 0, "worker 0") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
