"""Which sockets of the process are a process group's: all of its own, and nobody else's."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.collectives.process_group import GroupConnections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found by /proc")

SECONDS = 7.5
_numbers = count()


def make_group(size: int, host: str) -> tuple[list[Any], dist.Store]:
    """The members of a group, all of them in this process."""
    store = dist.PrefixStore(f"group {next(_numbers)}", dist.HashStore())
    made: list[Any] = [None] * size

    def make(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=20)
        made[rank] = dist.ProcessGroupGloo(store, rank, size, options)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made, store


@pytest.fixture
def others() -> Iterator[list[socket.socket]]:
    """Both ends of a connection that another thread opens while groups are made."""
    with ExitStack() as stack:
        listening = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        begun = stack.enter_context(closing(socket.create_connection(listening.getsockname())))
        accepted = stack.enter_context(closing(listening.accept()[0]))
        yield [begun, accepted]


def hosts() -> list[str]:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return ["127.0.0.1"]
    return ["127.0.0.1", "::1"]


def sums(groups: list[Any], wait: Callable[[Any], Any]) -> list[Any]:
    tensors = [torch.tensor([float(rank)]) for rank in range(len(groups))]
    works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    return [wait(work) for work in works] and [tensor.item() for tensor in tensors]


@pytest.mark.parametrize("host", hosts())
def test_a_group_s_connections_wait_as_long_as_they_are_told_and_no_others(host: str, others: list[socket.socket]):
    groups, store = make_group(3, host)
    other_groups, _ = make_group(2, host)

    found = [GroupConnections(store, rank, 3, SECONDS) for rank in range(3)]
    timeouts = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for own in found for each in own._sockets]
    assert [len(own._sockets) >= 2 for own in found] == [True] * 3  # one to each of the others
    assert set(timeouts) == {int(SECONDS * 1000)}
    assert not any(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in others)
    assert sums(groups, lambda work: work.wait()) == [3.0] * 3

    for own in found:
        own.forget()
    assert sums(groups, lambda work: work.wait()) == [3.0] * 3
    assert sums(other_groups, lambda work: work.wait()) == [1.0] * 2


def test_shut_down_ends_the_group_and_nothing_else(others: list[socket.socket]):
    groups, store = make_group(2, "127.0.0.1")
    other_groups, _ = make_group(2, "127.0.0.1")
    connections = GroupConnections(store, 0, 2, SECONDS)
    connections.shut_down()

    with pytest.raises(RuntimeError):
        sums(groups, lambda work: work.wait())
    begun, accepted = others
    begun.sendall(b"still there")
    assert accepted.recv(32) == b"still there"
    assert sums(other_groups, lambda work: work.wait()) == [1.0] * 2
    connections.forget()
