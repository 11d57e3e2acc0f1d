"""What every test is held to: no thread, process, environment variable or file outlives it."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.config import DeviceRegistry, LogicalDevice
    from lockstep.strategies.mirrored import MirroredStrategy

GRACE_S = 5.0
# Started by libraries, once a process, and ended by the interpreter: no test's to join.
SHARED_THREADS = ("pytest_timeout", "tqdm_monitor", "pymp-", "ThreadPoolExecutor-", "asyncio_")
IGNORED_FILES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".coverage"}
# torch sets the cache directory itself, at the first optimizer that is made; scikit-learn the last two, when imported.
IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "COLUMNS",
    "LINES",
    "TORCHINDUCTOR_CACHE_DIR",
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
    if fresh:
        gc.collect()
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
    """Whether this is one of multiprocessing's own processes, which live as long as the interpreter."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True
    return b"multiprocessing.resource_tracker" in command or b"multiprocessing.forkserver" in command


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
