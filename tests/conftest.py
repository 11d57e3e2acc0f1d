"""What every test is held to: no thread, process, environment variable or file outlives it. And programs for tests."""

from __future__ import annotations

import gc
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import SystemRandom
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

import pytest
from tests.programs.forking import begin_processes_with
from tests.tiers import has_none_of

# Before anything loads OpenMP, here and in all processes of tests: its threads else burn the cores, which tests share,
# while they wait for each other. 40 small steps on two threads took 20 s of processor time beside others, so 5 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from lockstep.config import DeviceRegistry, LogicalDevice
    from lockstep.replicas.context import ReplicaContext
    from lockstep.strategies.mirrored import MirroredStrategy

MakeStrategy = Callable[..., Any]
"""The fixture of a mirrored strategy: ``make_strategy(replicas)``."""

TESTS = Path(__file__).parent
FORKING = TESTS / "programs" / "forking.py"
GRACE_S = 5.0
# With the longest set-ups and tests.
BEGUN_FIRST = (
    "cli/test_backup.py",
    "launch/test_launch.py",
    "same_bits/test_same_bits.py",
    "same_bits/test_same_bits_more.py",
    "strategies/test_parallel.py",
    "strategies/test_parallel_checkpoints.py",
    "strategies/test_parallel_schedules.py",
    "strategies/test_logical_gpu_programs.py",
    "test_docs.py",
    "test_packaging.py",
    "train/test_resume_killed.py",
    "train/test_resume_workers.py",
)
BYTES = 2**16
# Started by libraries, once a process, and ended by the interpreter: no test's to join.
SHARED_THREADS = ("pytest_timeout", "tqdm_monitor", "pymp-", "ThreadPoolExecutor-", "asyncio_", "InductorSubproc")
IGNORED_FILES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".coverage"}
# torch sets the cache directory itself, at the first optimizer that is made, and CUDA's when its first GPU is used, the
# Triton ones at the first compilation; scikit-learn the last two, when imported.
IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "COLUMNS",
    "LINES",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "CUDA_MODULE_LOADING",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


@pytest.fixture(autouse=True)
def _leaks_nothing() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process, an environment variable or a file behind."""
    threads, children, variables, files = _threads(), _children(), _variables(), _files()
    yield
    leaks = [
        *(f"thread {thread.name!r}" for thread in _left(threads)),
        *(f"child process {pid}" for pid in sorted(_still_there(_children() - children))),
        *(f"environment variable {name}" for name in sorted(_changed(variables, _variables()))),
        *(f"file {name} in {Path.cwd()}" for name in sorted(_files() - files)),
    ]
    if leaks:
        pytest.fail(f"the test left behind: {', '.join(leaks)}", pytrace=False)


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads started since, still alive after what nobody holds has been collected and a bounded time to end."""
    fresh = [t for t in _threads() - before if not t.name.startswith(SHARED_THREADS)]
    # What a tensor holds through C++ is dropped by the collection after the one that drops the tensor.
    while any(thread.is_alive() for thread in fresh) and gc.collect():
        pass
    for thread in fresh:
        thread.join(GRACE_S)
    return [thread for thread in fresh if thread.is_alive()]


def _children() -> set[int]:
    """Processes whose parent is this one. A zombie counts: somebody started it and did not wait for it."""
    listed: set[int] = set()
    for task in Path("/proc/self/task").glob("*"):
        try:
            listed.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:  # the thread ended while we were reading
            continue
    return {pid for pid in listed if not _is_shared(pid)}


def _is_shared(pid: int) -> bool:
    """Whether it is one of multiprocessing's or of torch.compile's own processes, which live as long as this one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True
    known = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"_inductor/compile_worker")
    return any(name in command for name in known)


def _still_there(fresh: set[int]) -> set[int]:
    """Those of the processes that neither ended in a bounded time nor were waited for."""
    for pid in fresh:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([handle], [], [], GRACE_S)
        os.close(handle)
    return fresh & _children()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}


def _changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _files() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()} - IGNORED_FILES


class ForkServer:
    """The process of ``programs/forking.py``. It imports beside the first tests, which wait for it where they need it.

    Attributes:
        path: of the socket where it is asked.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forking-")
        self.path = f"{self._folder.name}/socket"
        life, self._life = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.path)
            listener.listen()
            files = [listener.fileno(), life]
            command = [sys.executable, str(FORKING), *map(str, files)]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, pass_fds=files, stdin=nowhere, stdout=nowhere, start_new_session=True
            )
        os.close(life)

    def close(self) -> None:
        """Kills it, and with it whatever it has forked.

        Closing ``_life`` is not enough: a forked process of this one, such as a DataLoader's worker that hangs, holds
        that file open too, and the server would be waited for without a limit.
        """
        os.close(self._life)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class Forks:
    """A connection to it. What was forked for it ends with it."""

    def __init__(self, path: str) -> None:
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.connect(path)

    def begin(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Begins a process that has these files for stdout and stderr; its number."""
        socket.send_fds(self._requests, [json.dumps(request).encode()], files)
        return int(self._requests.recv(BYTES))

    def collect(self, pid: int) -> int:
        """The exit code of a process that has ended, negative for a signal."""
        self._requests.send(json.dumps({"wait": pid}).encode())
        return int(self._requests.recv(BYTES))

    def close(self) -> None:
        self._requests.close()


class Program:
    """``python WORDS`` in a process that begins with the usual imports done; used as a ``subprocess.Popen`` with pipes.

    Attributes:
        args: what follows ``python``.
        pid: of the process.
        returncode: None while it runs; negative for a signal.
        stdout: what it prints, as text.
        stderr: the same of its errors.
    """

    def __init__(
        self, forks: Forks, words: Sequence[str], folder: Path, environment: Mapping[str, str], **request: Any
    ) -> None:
        self._forks = forks
        self.args = list(words)
        self.returncode: int | None = None
        (printed, out), (errors, err) = os.pipe(), os.pipe()
        request = {"words": self.args, "folder": str(folder), "environment": dict(environment), **request}
        self.pid = forks.begin(request, [out, err])
        os.close(out)
        os.close(err)
        self._handle = os.pidfd_open(self.pid)
        self.stdout, self.stderr = open(printed), open(errors)  # noqa: PTH123, SIM115 - a pipe, closed with the process
        self._readers: list[threading.Thread] = []
        self._read: dict[TextIO, str] = {}

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; what it has printed, and its errors, as far as they were not read before."""
        end = monotonic() + (threading.TIMEOUT_MAX / 2 if timeout is None else timeout)
        if not self._readers:
            self._readers = [threading.Thread(target=self._read_all, args=[f]) for f in (self.stdout, self.stderr)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(max(0.0, end - monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(max(0.0, end - monotonic()))
        return self._read[self.stdout], self._read[self.stderr]

    def _read_all(self, stream: TextIO) -> None:
        self._read[stream] = stream.read()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._forks.collect(self.pid)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills it if it still runs."""
        self.kill()
        self.wait()
        for reader in self._readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        os.close(self._handle)


FreePorts = Callable[[int], list[int]]


@pytest.fixture(scope="session")
def free_ports() -> FreePorts:
    """``free_ports(n)``: different ports at which nobody listens, of those that Linux does not give out by itself."""

    def is_free(port: int) -> bool:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return True
        return False

    def find(count: int) -> list[int]:
        tried = SystemRandom().sample(range(10_000, 32_768), 1_000)
        return list(islice(filter(is_free, tried), count))

    return find


SERVER = pytest.StashKey[ForkServer]()


def pytest_configure(config: pytest.Config) -> None:
    """Starts one server for all processes of tests, where there are several, and has it fork these."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all is collected
        return
    config.stash[SERVER] = server = ForkServer()
    begin = shlex.join([sys.executable, str(FORKING), "as", server.path])
    config.option.tx = [f"popen//python={begin}" if spec == "popen" else spec for spec in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["forking"] = node.config.stash[SERVER].path


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of which ``-m`` would leave out every test: what they import takes seconds."""
    if collection_path.suffix == ".py" and has_none_of(config.getoption("markexpr"), collection_path.read_text()):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """What is left after pytest's own selection is put in order."""
    _check_what_is_left_out(items)
    yield
    _begin_with_the_longest(items)


def _check_what_is_left_out(items: Sequence[pytest.Item]) -> None:
    """No test is slow, or quick, of which the text of its file does not say so: no tier would have it."""
    texts = {path: path.read_text() for path in {item.path for item in items}}
    for item in items:
        tier = "slow and not pages" if item.get_closest_marker("slow") else "not slow"
        if has_none_of(tier, texts[item.path]):
            raise pytest.UsageError(f"{item.nodeid} is of the tier {tier!r}, for which tests.tiers leaves out its file")


def pytest_collection_finish() -> None:
    """Has collections of garbage pass over what the imports made, and which stays until the process ends.

    With torch, transformers and this package imported, a whole collection takes 0.17 s: 375,000 objects.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Has every process of several begin with its part of the longest tests, so that none is left with one at the end.

    Those of a file that share a set-up stay together, or each process would make it once.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long: dict[object, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        if _file(item) in BEGUN_FIRST:
            long.setdefault(item.path if _shares_a_set_up(item) else item.nodeid, []).append(item)
        else:
            others.append(item)
    each = len(items) // processes
    items.clear()
    for number in range(processes):
        first = [item for together in list(long.values())[number::processes] for item in together]
        rest = len(others) if number == processes - 1 else max(0, each - len(first))
        items += [*first, *others[:rest]]
        del others[:rest]


def _shares_a_set_up(item: pytest.Item) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    return fixtures is not None and any(
        definitions[-1].scope == "module" for definitions in fixtures.name2fixturedefs.values()
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVER in config.stash:
        config.stash[SERVER].close()


@pytest.fixture(scope="session")
def forks(request: pytest.FixtureRequest) -> Iterator[Forks]:
    """Asks for processes that begin with the usual imports done."""
    path = getattr(request.config, "workerinput", {}).get("forking")
    with ExitStack() as stack:
        if path is None:
            path = stack.enter_context(closing(ForkServer())).path
        yield stack.enter_context(closing(Forks(path)))


@pytest.fixture(scope="session", autouse=True)
def _processes_begin_with_the_imports_too(request: pytest.FixtureRequest) -> None:
    """Has multiprocessing fork from the server of all tests, where there is one, rather than import all that again."""
    if not hasattr(request.config, "workerinput"):
        return
    begin_processes_with(request.getfixturevalue("forks").begin)


@pytest.fixture
def python(forks: Forks, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """``python("-c", code)``: starts that in the test's folder; what still runs at the end of the test is killed.

    ``network`` is the name of a network namespace to run it in. With ``forks_workers`` those of ``lockstep run`` begin
    with the imports too, for tests that send no signal until they have all begun.
    """
    with ExitStack() as stack:

        def start(
            *words: str, folder: Path = tmp_path, network: str = "", forks_workers: bool = False, **variables: str
        ) -> Program:
            environment, how = {**os.environ, **variables}, {"network": network, "forks_workers": forks_workers}
            return stack.enter_context(closing(Program(forks, words, folder, environment, **how)))

        yield start


def here() -> ReplicaContext:
    """The context of the replica that calls it."""
    from lockstep.replicas.context import get_replica_context

    context = get_replica_context()
    assert context is not None
    return context


@contextmanager
def computing_on(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_core() -> Iterator[None]:
    """torch computes on one thread: tiny models are faster so."""
    with computing_on(1):
        yield


@pytest.fixture
def two_cores() -> Iterator[None]:
    """torch computes on two threads, whatever OMP_NUM_THREADS is: two replicas of a strategy run at a time."""
    with computing_on(2):
        yield


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """torch.compile as in a new process, its counters too; what the test compiles goes with it."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_devices(monkeypatch: pytest.MonkeyPatch) -> DeviceRegistry:
    """A device registry of this test's own: nothing split, nothing in use."""
    from lockstep import config

    registry = config.DeviceRegistry()
    monkeypatch.setattr(config, "_registry", registry)
    return registry


@pytest.fixture
def split_cpu(fresh_devices: DeviceRegistry) -> Callable[[int], tuple[LogicalDevice, ...]]:
    """A function that splits the CPU into ``n`` logical devices, in a registry of this test's own."""
    from lockstep import config

    def split(n: int) -> tuple[LogicalDevice, ...]:
        (cpu,) = config.list_physical_devices("CPU")
        config.set_logical_device_configuration(cpu, [config.LogicalDeviceConfiguration() for _ in range(n)])
        return tuple(config.list_logical_devices("CPU"))

    return split


@pytest.fixture
def make_strategy(split_cpu: Callable[[int], tuple[LogicalDevice, ...]]) -> Iterator[Callable[..., MirroredStrategy]]:
    """A function that makes a strategy of ``replicas`` replicas on the CPU; all are closed after the test."""
    from lockstep.strategies.mirrored import MirroredStrategy

    with ExitStack() as stack:

        def make(replicas: int, *, seed: int | None = 0, timeout_s: float = 60.0) -> MirroredStrategy:
            devices = split_cpu(4)[:replicas]
            return stack.enter_context(closing(MirroredStrategy(devices, seed=seed, timeout_s=timeout_s)))

        yield make
