"""torch's elastic agent for the workers of this host, made quiet, impatient and exact about who failed first.

Rendezvous, ranks, environment, starting, watching and restarting are torch's. Added: the time at which each worker
ended, a limit on the whole, a way of stopping that leaves a worker time to save, and no torch banners.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext

from lockstep.errors import ClusterError
from lockstep.launch.deaths import Deaths

_POLL_S = 0.02
_LOST_RESULT_S = 1.0
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the agent waits.

    Args:
        run_s: seconds that the workers may take; None for as long as they like.
        stop_s: seconds that they get after SIGTERM, to save what they have, before they are killed.
        interrupt_s: seconds that they get after Ctrl-C.
    """

    run_s: float | None = None
    stop_s: float = 30.0
    interrupt_s: float = 3.0


class Agent(LocalElasticAgent):
    """One run of the workers of this host.

    Args:
        spec: what to start, how often, and how the launchers meet.
        logs: where the workers' output goes.
        start_method: of multiprocessing, for functions.
        limits: how long to wait.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, *, start_method: str, limits: Limits) -> None:
        super().__init__(spec, logs, start_method=start_method, shutdown_timeout=int(limits.stop_s))
        self._limits = limits
        self._until = None if limits.run_s is None else time.monotonic() + limits.run_s
        self._deaths: Deaths | None = None
        self._ended_ns: dict[int, int] = {}

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit code of every worker of this host in the last attempt; None for one that still runs."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            return {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
        if isinstance(context, MultiprocessContext) and context._pc is not None:
            return {local: process.exitcode for local, process in enumerate(context._pc.processes)}
        return {}

    @property
    def ended_ns(self) -> dict[int, int]:
        """When those workers ended that did so by themselves, in the last attempt."""
        return self._ended_ns

    @property
    def first_worker(self) -> int:
        """The number, among the workers of all hosts, of this host's first."""
        workers = self._worker_group.workers
        return int(workers[0].global_rank) if workers else 0

    @property
    def num_workers(self) -> int:
        """The workers of all hosts."""
        workers = self._worker_group.workers
        return int(workers[0].world_size) if workers else 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_watching()
        self._ended_ns = {}
        with _main_is_not_run_again():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self._deaths = Deaths(ids)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._deaths is not None:
            self._ended_ns = self._deaths.ended_ns  # before torch ends the others
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            if self._lost_a_result():
                return RunResult(state=WorkerState.UNHEALTHY)
            if self._until is not None and time.monotonic() > self._until:
                raise ClusterError(
                    f"the {self.num_workers} workers had not ended after {self._limits.run_s:g} s and were ended;"
                    " give them more time with timeout_s, or None for no limit"
                )
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_watching()
        limit = self._limits.interrupt_s if death_sig == signal.SIGINT else self._limits.stop_s
        if self._pcontext is not None and self._pcontext.pids():
            _ask_to_end(list(self._pcontext.pids().values()), death_sig, limit)
        super()._shutdown(death_sig, 1)

    def _lost_a_result(self) -> bool:
        """Whether a function's process has been gone for a while without a result, which torch would wait for."""
        if not isinstance(self._pcontext, MultiprocessContext):
            return False
        oldest = min(self._ended_ns.values(), default=time.monotonic_ns())
        return time.monotonic_ns() - oldest > _LOST_RESULT_S * 1e9

    def _stop_watching(self) -> None:
        if self._deaths is not None:
            self._deaths.close()
            self._deaths = None


def _ask_to_end(pids: list[int], sign: signal.Signals, limit_s: float) -> None:
    """Sends the signal to the workers alone and waits for them.

    torch sends it to their whole process groups, which would end a DataLoader's processes under a worker that saves.
    """
    for pid in pids:
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            continue
    deaths = Deaths(dict(enumerate(pids)))
    until = time.monotonic() + limit_s
    wait = threading.Event()
    while len(deaths.ended_ns) < len(pids) and time.monotonic() < until:
        wait.wait(_POLL_S)
    deaths.close()


@contextmanager
def _main_is_not_run_again() -> Iterator[None]:
    """While processes are started: hides from multiprocessing which file ``__main__`` was.

    It would run that file again in every worker, to find functions there by name; ours come by value. So a script
    needs no ``if __name__ == "__main__"``, and nothing that it does at its top is done N times over.
    """
    main = sys.modules["__main__"]
    shown = ModuleType("__main__")
    shown.__spec__ = None
    sys.modules["__main__"] = shown
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Puts the signal handlers back that were there before; torch sets its own and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _HANDLED}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def torch_log(file: Path | None) -> Iterator[None]:
    """Sends what torch's launcher logs to a file, or to nobody: what matters of it we say ourselves."""
    handler = logging.NullHandler() if file is None else logging.FileHandler(file, delay=True)
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
        handler.close()
