"""Trials in fresh processes of this Python: each imports the package and runs the contender's function.

Where a contender asks for a link, its processes run on two hosts that it joins, the first half of them on the first.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host, Link, two_hosts
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.trial import END_LIMIT_S, TRIAL_LIMIT_S, Launcher, RunningTrial, Trial
from lockstep.errors import ReplicaError
from lockstep.parent_death import ParentDeathGuard, die_with


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process of a trial."""

    rank: int  # 0 to processes - 1
    started_s: float  # ``time.monotonic()`` just before the trial's first process was started
    store: str  # path of a file, not there yet, at which the processes of the trial meet
    guard: str  # path of the guard that ends the process with the benchmark
    host: Host | None = None  # None is this machine as it is


Body = Callable[[Trial, ProcessInfo, StepTimer], None]
"""Trains in one process of a trial, calling ``timer.record_step`` after every step."""


@dataclass(frozen=True, kw_only=True)
class SpawnedBody(Launcher):
    """Runs a function in each of the trial's processes."""

    body: Body  # pickled by its name
    link: Link | None = None  # between the two hosts that the processes run on; None is one host, this machine
    # A module that is imported once, in a process from which all trials' are forked, so that they begin sooner; what it
    # imports must not touch a GPU. Empty: each process is a new interpreter.
    preloaded: str = ""

    def launch(self, trial: Trial, folder: Path) -> RunningTrial:
        return _SpawnedTrial(self, trial, folder)


class _SpawnedTrial(RunningTrial):
    def __init__(self, launcher: SpawnedBody, trial: Trial, folder: Path) -> None:
        self._launcher = launcher
        self._trial = trial
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._guard = ParentDeathGuard()
        self._done = False
        with ExitStack() as stack:
            hosts = None if launcher.link is None else stack.enter_context(two_hosts(launcher.link))
            stack.callback(self._end_processes)
            started_s, number = time.monotonic(), trial.contender.processes
            for rank in range(number):
                host = None if hosts is None else hosts[rank * len(hosts) // number]
                store, guard = str(folder / "store"), self._guard.path
                self._start(ProcessInfo(rank=rank, started_s=started_s, store=store, guard=guard, host=host))
            self._resources = stack.pop_all()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def records(self) -> list[StepRecord]:
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        records: dict[int, StepRecord] = {}
        limit = time.monotonic() + self._trial.contender.limit_s
        while waiting:
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                raise ReplicaError(self._trial.too_slow)
            for connection in self._connections:
                if connection in ready:
                    records[waiting.pop(connection)] = self._receive(connection)
        self._done = True
        return [records[rank] for rank in sorted(records)]

    def end(self) -> None:
        self._resources.close()

    def _start(self, info: ProcessInfo) -> None:
        near, far = multiprocessing.Pipe()
        process = _process(self._launcher.preloaded, (self._launcher.body, self._trial, info, far))
        process.start()
        far.close()
        self._processes.append(process)
        self._connections.append(near)

    def _end_processes(self) -> None:
        for connection in self._connections:
            connection.close()
        limit = time.monotonic() + (END_LIMIT_S if self._done else 0.0)
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
        self._guard.kill()  # also those that were asked to end and have not, and whatever they had started
        for process in self._processes:
            process.join()
            process.close()

    def _receive(self, connection: Connection) -> StepRecord:
        try:
            answer: StepRecord | str = connection.recv()
        except EOFError:
            answer = "it sent nothing; run it alone with --only"
        if isinstance(answer, str):
            wait([connection], END_LIMIT_S)  # until it ends, and has printed its traceback
            raise ReplicaError(f"{self._trial.name} ended before its last step: {answer}")
        return answer


def _process(preloaded: str, args: tuple[Any, ...]) -> BaseProcess:
    if not preloaded:
        return multiprocessing.get_context("spawn").Process(target=run_body, args=args, daemon=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded])  # used by the first process only: the server lives on with this one
    return context.Process(target=run_body, args=args, daemon=True)


def run_body(body: Body, trial: Trial, info: ProcessInfo, connection: Connection) -> None:
    """One process of a trial: trains, reports inside the last step, and waits there until all were measured."""
    os.setsid()
    die_with(info.guard)

    def report(record: StepRecord) -> None:
        connection.send(record)
        connection.poll(TRIAL_LIMIT_S)  # the other end sends nothing; it closes when the memory has been read

    if info.host is not None:
        info.host.enter()
    interface = "" if info.host is None else info.host.interface
    timer = StepTimer(
        warm_up=trial.warm_up,
        steps=trial.steps,
        started_s=info.started_s,
        report=report,
        interface=interface,
        lap=trial.lap,
    )
    try:
        body(trial, info, timer)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".split("\n")[0])  # its traceback goes to stderr
        raise
