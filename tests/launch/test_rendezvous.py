"""How launchers that come and go meet: who serves the store where they do, also when its name is known late."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

from lockstep.errors import ClusterError
from lockstep.launch.rendezvous import ElasticHosts

NAME = "pod-0.job"
LIMIT_S = 20.0


class NameService:
    """What is asked for the address of ``NAME``, and does not know it before it is told to."""

    def __init__(self) -> None:
        self._ask = socket.getaddrinfo
        self._knows = False
        self._asked = 0
        self._changed = threading.Condition()

    def look_up(self, host: str, *arguments: object, **options: object) -> list[object]:
        if host != NAME:
            return self._ask(host, *arguments, **options)
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            if not self._knows:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._ask("127.0.0.1", *arguments, **options)

    def learn_after(self, questions: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked >= questions, LIMIT_S)
            self._knows = True


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameService:
    service = NameService()
    monkeypatch.setattr(socket, "getaddrinfo", service.look_up)
    return service


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


Meet = Callable[..., RendezvousHandler]


@pytest.fixture
def meet(port: int) -> Iterator[Meet]:
    def meet(host: str, timeout_s: float = LIMIT_S) -> RendezvousHandler:
        return ElasticHosts(address=f"{host}:{port}", least=1, most=2, job="a job", timeout_s=timeout_s).meet(
            lambda line: None
        )

    return meet


def test_a_host_whose_own_name_is_known_late_serves_and_the_others_find_it(names: NameService, meet: Meet):
    with ThreadPoolExecutor(2) as pool:
        hosts = [pool.submit(meet, NAME) for _ in range(2)]
        names.learn_after(6)  # each has tried to serve it, and to find it, more than once

        first, second = [host.result(LIMIT_S) for host in hosts]

    assert first.get_run_id() == second.get_run_id() != ""


def test_a_name_that_stays_unknown_is_said_when_the_time_is_over(names: NameService, meet: Meet):
    said = rf"waited 0\.2 s for the launcher that serves the rendezvous \(the name '{NAME}' cannot be looked up"

    with pytest.raises(ClusterError, match=said):
        meet(NAME, timeout_s=0.2)


def test_an_address_elsewhere_is_looked_for_until_the_time_is_over(meet: Meet):
    with pytest.raises(ClusterError, match=r"waited 0\.2 s for the launcher that serves .* \(.*192\.0\.2\.1"):
        meet("192.0.2.1", timeout_s=0.2)


def test_launchers_that_come_at_the_same_moment_agree_on_who_serves(meet: Meet):
    together = threading.Barrier(8)

    def come(_: int) -> RendezvousHandler:
        together.wait(LIMIT_S)
        return meet("127.0.0.1")

    with ThreadPoolExecutor(8) as pool:
        handlers = list(pool.map(come, range(8)))

    assert len({handler.get_run_id() for handler in handlers}) == 1
