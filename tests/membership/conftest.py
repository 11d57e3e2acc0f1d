"""Members of a job in processes of their own, each doing what the test tells it: ``members``."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
from tests.conftest import FreePorts

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.membership import Membership, join

LIMIT_S = 60.0
LOST_AFTER_S = 2.0


@dataclass(frozen=True)
class Said:
    """What a member answered: a value or an error, and when by the clock that all processes share."""

    value: Any
    error: str
    notes: tuple[str, ...]
    at_s: float


class Member:
    """A process that is, or is to become, a worker.

    Args:
        spec: the arguments of its ``ClusterSpec``.
        stack: what ends with the test.
        **settings: further arguments of its ``join``.
    """

    def __init__(self, spec: Mapping[str, Any], stack: ExitStack, **settings: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "lockstep", "lockstep.membership.membership"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(theirs, dict(spec), settings))
        self.process.start()
        theirs.close()
        stack.enter_context(closing(self.pipe))
        stack.callback(self.end)
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def begin(self, what: str, *arguments: Any) -> Member:
        """Has the member do something; ``answer`` gives what came of it."""
        self.pipe.send((what, arguments))
        return self

    def has_answered(self, within_s: float = 0.0) -> bool:
        """Whether the last thing begun is done, or is soon."""
        return self.pipe.poll(within_s)

    def answer(self, limit_s: float = LIMIT_S) -> Said:
        """What came of the last thing begun."""
        if not self.pipe.poll(limit_s):
            pytest.fail(f"no answer within {limit_s} s")
        return Said(*self.pipe.recv())

    def do(self, what: str, *arguments: Any) -> Any:
        """Has the member do something that succeeds; what it returned."""
        said = self.begin(what, *arguments).answer()
        assert not said.error, said.error
        return said.value

    def error(self, what: str, *arguments: Any) -> str:
        """Has the member do something that fails with a ClusterError; its message."""
        return self.begin(what, *arguments).answer().error

    def send(self, number: signal.Signals) -> float:
        """Sends a signal; when."""
        os.kill(self.pid, number)
        return time.monotonic()

    def end(self) -> None:
        """Kills the process, if it is there, and waits for it."""
        self.process.kill()
        self.process.join(LIMIT_S)


def live(pipe: Connection, spec: dict[str, Any], settings: dict[str, Any]) -> None:
    """The life of a member: one request after another, until the test hangs up."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    requests = Requests(spec, settings, warnings)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (getattr(requests, what)(*arguments), "", ())
        except ClusterError as error:
            answer = (None, str(error), tuple(getattr(error, "__notes__", ())))
        pipe.send((*answer, time.monotonic()))


class Requests:
    """What a member can be told to do."""

    def __init__(self, spec: dict[str, Any], settings: dict[str, Any], warnings: list[str]) -> None:
        self._spec = spec
        self._settings = settings
        self._warnings = warnings
        self._member: Membership | None = None
        self._called: list[tuple[str, str]] = []
        self._many: list[Membership] = []
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def join(self) -> dict[str, Any]:
        settings = {"timeout_s": 30.0, "lost_after_s": LOST_AFTER_S} | self._settings
        self._member = join(ClusterSpec(**self._spec), **settings)
        self._member.subscribe(lambda error: self._called.append((threading.current_thread().name, str(error))))
        return {"names": self._member.names, "infos": self._member.infos, "address": self._member.address}

    def join_as(self, ranks: Sequence[int]) -> None:
        """Joins as several workers, each with threads and connections of its own."""
        specs = [ClusterSpec(**self._spec, index=rank) for rank in ranks]
        with ThreadPoolExecutor(len(specs)) as pool:
            self._many = list(pool.map(lambda spec: join(spec, **self._settings), specs))
        for member in self._many:
            member.subscribe(lambda error: self._told.put(str(error)))

    def told(self) -> list[str]:
        """What all of these workers were told when one was lost."""
        return [self._told.get(timeout=LIMIT_S) for _ in self._many]

    def close_all(self) -> None:
        with ThreadPoolExecutor(len(self._many)) as pool:
            list(pool.map(Membership.close, self._many))

    def limit_files(self, files: int) -> None:
        """Lowers this process's limit of open files, which it may raise again."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def wait(self, limit_s: float) -> str:
        """Waits as one does in a collective: looks again and again, and raises what it finds."""
        pause, limit = threading.Event(), time.monotonic() + limit_s
        while time.monotonic() < limit:
            try:
                self.member.check()
            except ClusterError as error:
                self._last = error
                raise
            pause.wait(0.05)
        return "nothing happened"

    def work_alone(self, seconds: float) -> None:
        """Needs nobody for a while."""
        threading.Event().wait(seconds)

    def explain(self, text: str) -> None:
        raise self.member.explain_broken(RuntimeError(text), "the sum of gradients")

    def fail(self, text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError as error:
            error.add_note("raised in replica 3 (cpu:1)")
            self.member.report_failure(error)

    def fail_with_last(self) -> None:
        """Fails with what the last look found, as whoever waited does."""
        self.member.report_failure(self._last)

    def fork(self) -> None:
        """Forks a process that ends as an interpreter does, with its exit handlers."""
        if not (pid := os.fork()):
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(pid, 0)

    def doing(self, text: str) -> None:
        self.member.set_status(text)

    def other_statuses(self) -> str:
        return self.member.describe_other_statuses()

    def close(self) -> float:
        began = time.monotonic()
        self.member.close()
        return time.monotonic() - began

    def called(self) -> list[tuple[str, str]]:
        return self._called

    def said(self) -> list[str]:
        return self._warnings

    def threads(self) -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())

    def put(self, group: str, key: str, text: str) -> str:
        store = self.member.store(group)
        store.set(key, text)
        return store.get(key).decode()

    def pretend(self, module: str, name: str, value: Any) -> None:
        """Makes this process another version of itself."""
        setattr(sys.modules[module], name, (lambda package: value) if name == "version" else value)

    @property
    def member(self) -> Membership:
        assert self._member is not None
        return self._member


MakeMembers = Callable[..., list[Member]]


@pytest.fixture
def free_port(free_ports: FreePorts) -> int:
    """A port at which nobody listens."""
    (port,) = free_ports(1)
    return port


@pytest.fixture
def start() -> Iterator[Callable[..., Member]]:
    """``start(spec_arguments, **join_arguments)``: a member in a process of its own, gone after the test."""
    with ExitStack() as stack:
        yield lambda spec, **settings: Member(spec, stack, **settings)


@pytest.fixture
def addresses(free_port: int) -> list[str]:
    """Three workers' addresses, on loopback addresses of their own."""
    return [f"127.0.0.{host}:{free_port}" for host in (1, 2, 3)]


@pytest.fixture
def members(start: Callable[..., Member], addresses: list[str]) -> MakeMembers:
    """``members(3)``: a job of that many members that have all joined; keyword arguments go to ``join``."""

    def make(count: int, **settings: Any) -> list[Member]:
        made = [
            start({"workers": addresses[:count], "index": i}, info={"replicas": i + 1}, **settings)
            for i in range(count)
        ]
        for member in made:
            member.begin("join")
        for member in made:
            assert member.answer().error == ""
        return made

    return make
