"""Workers as processes of their own: one job that many tests look at, and such as tests start, stop and kill."""

from __future__ import annotations

import json
import os
import re
import runpy
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from tests.conftest import FreePorts

import lockstep as ls

COMPUTING = Path(__file__).parent / "programs" / "multi_worker.py"
LAYOUTS = {"2 workers x 2": (2, 2), "3 workers x 2": (3, 2), "2 workers x 1": (2, 1)}
ENOUGH_S = 60.0
SAYS_WHERE_S = 5.0
BYTES = 2**16
ERROR = re.compile(r"[\w.]*(Error|Interrupt)(: |$)")


class Worker:
    """One process: what it prints, what signals it gets, how it ends.

    Args:
        pid: its number.
        printed: the end of the pipe that its stdout goes to.
        errors: the file that its stderr goes to.
        collect: gives the exit code of a process that has ended.
    """

    def __init__(self, pid: int, printed: int, errors: IO[bytes], collect: Callable[[int], int]) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self._printed = printed
        self._text = ""
        self._errors = errors
        self._collect = collect
        self._code: int | None = None
        self.job: Sequence[Worker] = (self,)

    def wait_for(self, text: str, *, limit_s: float = ENOUGH_S) -> str:
        """Waits until it has printed ``text`` after what was waited for before; returns what stood before it."""
        until = time.monotonic() + limit_s
        while text not in self._text:
            left_s = until - time.monotonic()
            if not select.select([self._printed], [], [], max(0.0, left_s))[0] or not self._read():
                pytest.fail(
                    f"never printed {text!r}; it printed {self._text!r} and {self.errors!r}\n{self._all_stand()}"
                )
        before, _, self._text = self._text.partition(text)
        return before

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        signal.pidfd_send_signal(self._handle, number)

    def end(self, *, limit_s: float = ENOUGH_S) -> int:
        """Waits until it has ended; its exit code, negative for a signal."""
        if self._code is None:
            if not select.select([self._handle], [], [], max(0.0, limit_s))[0]:
                pytest.fail(f"has not ended within {limit_s:.1f} s; it printed {self.errors!r}\n{self._all_stand()}")
            self._code = self._collect(self.pid)
        return self._code

    @property
    def output(self) -> str:
        """What it has printed since what was waited for; all of it once it has ended."""
        while select.select([self._printed], [], [], 0)[0] and self._read():
            pass
        return self._text

    @property
    def errors(self) -> str:
        """What it has written to stderr so far."""
        return os.pread(self._errors.fileno(), BYTES, 0).decode(errors="replace")

    @property
    def error(self) -> str:
        """The error that it ended with, such as ``"lockstep.errors.ClusterError: worker 1 ..."``."""
        own, _, _ = self.errors.partition("\nTraceback of worker ")  # what another worker had to say stands below it
        named = [line for line in own.splitlines() if ERROR.match(line)]
        return named[-1] if named else f"none, but {self.errors!r}"

    @property
    def raised_at(self) -> float:
        """When the error came out of the function, on the clock of ``time.monotonic``. It must have ended."""
        return float(self.output.partition("\nraised at ")[2])

    def close(self) -> None:
        """Kills it if it is still there."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.end()
        os.close(self._handle)
        os.close(self._printed)
        self._errors.close()

    def _all_stand(self) -> str:
        """Where all workers of the job stand, which ends them."""
        return "\n".join(f"worker {number} stood here:\n{each.stands()}" for number, each in enumerate(self.job))

    def stands(self) -> str:
        """Where it stands, which ends it; nothing if it has ended, or is stopped."""
        if self._code is not None:
            return ""
        written = os.fstat(self._errors.fileno()).st_size
        self.send(signal.SIGABRT)
        select.select([self._handle], [], [], SAYS_WHERE_S)
        said = os.pread(self._errors.fileno(), BYTES, written).decode(errors="replace")
        return said.partition("\nExtension modules: ")[0]

    def _read(self) -> bool:
        got = os.read(self._printed, BYTES)
        self._text += got.decode(errors="replace")
        return bool(got)


StartWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def start_worker(forks: Any) -> StartWorker:
    """A function that starts a process which calls a function of a file."""

    def start(
        file: str, function: str, arguments: Sequence[Any], environment: dict[str, str], network: str = ""
    ) -> Worker:
        printed, prints = os.pipe()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  the worker closes it
        request = {"file": file, "function": function, "arguments": list(arguments)}
        request |= {"environment": environment, "network": network}
        pid = forks.begin(request, [prints, errors.fileno()])
        os.close(prints)
        return Worker(pid, printed, errors, forks.collect)

    return start


StartJob = Callable[..., list[Worker]]


@pytest.fixture
def start_job(start_worker: StartWorker, free_ports: FreePorts, request: pytest.FixtureRequest) -> Iterator[StartJob]:
    """``start_job(function, *arguments, workers=2)``: workers that find TF_CONFIG call a function of the test's file.

    An argument "index" is each worker's own number. With ``hosts`` there is one worker at each address, in the network
    namespace that ``networks`` names; ``order`` is that in which they are started, all of them unless some are left
    out. Those that still run after the test are killed.
    """
    with ExitStack() as stack:
        yield _starter(start_worker, free_ports, request.path, stack)


@pytest.fixture(scope="module")
def start_module_job(
    start_worker: StartWorker, free_ports: FreePorts, request: pytest.FixtureRequest
) -> Iterator[StartJob]:
    """The same, for a job that several tests look at."""
    with ExitStack() as stack:
        yield _starter(start_worker, free_ports, request.path, stack)


def _starter(start_worker: StartWorker, free_ports: FreePorts, path: Path, stack: ExitStack) -> StartJob:
    def start(
        function: Callable[..., Any],
        *arguments: Any,
        workers: int = 2,
        hosts: Sequence[str] = (),
        networks: Sequence[str] = (),
        order: Sequence[int] = (),
    ) -> list[Worker]:
        hosts = hosts or ["127.0.0.1"] * workers
        addresses = [f"{host}:{port}" for host, port in zip(hosts, free_ports(len(hosts)), strict=True)]
        started = {}
        for index in order or range(len(addresses)):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            worker = start_worker(
                str(path),
                function.__name__,
                [index if argument == "index" else argument for argument in arguments],
                {"TF_CONFIG": json.dumps(task), "OMP_NUM_THREADS": "1"},
                networks[index] if networks else "",
            )
            started[index] = stack.enter_context(closing(worker))
        job = [started[index] for index in sorted(started)]
        for worker in job:
            worker.job = job
        return job

    return start


def load(path: Path) -> Any:
    """What a program defines; of a module that no worker can import, so that functions travel by value."""
    return SimpleNamespace(**runpy.run_path(str(path), run_name=f"program_{path.stem}"))


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Any:
    """What the file's ``PROGRAM`` defines, by default ``programs/multi_worker.py``."""
    return load(getattr(request.module, "PROGRAM", COMPUTING))


@pytest.fixture(scope="module")
def one_device(program: Any) -> Callable[..., Any]:
    """The program's ``one_device``, which computes everything once."""
    return cache(program.one_device)


@pytest.fixture(scope="session")
def run_layout() -> Callable[[str], dict[str, Any]]:
    """``run_layout("2 workers x 2")``: what the program's job computes on its chief, launched once a layout.

    The files that look at it stand side by side, so that one process of many usually has the tests of both.
    """

    run_job = load(COMPUTING).run_job

    @cache
    def run(layout: str) -> dict[str, Any]:
        workers, replicas = LAYOUTS[layout]
        return ls.launch(run_job, workers=workers, args=(replicas,), timeout_s=250)

    return run


@pytest.fixture(scope="session", params=LAYOUTS)
def result(request: pytest.FixtureRequest, run_layout: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What the job computes, on each layout."""
    return run_layout(request.param)
