"""Trials in another Python: a program that shares only the step timer with this package, and may have no torch.

    job, as JSON on the command line ->  program  -> each process that trains: one line of JSON on a Unix socket, inside
                                                     its last step, and then it waits until we close the socket

The socket also shows which processes train, whoever started them: a framework's launcher stands between us and them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lockstep
import lockstep_tools
from benchmarks.step_timer import StepRecord
from benchmarks.trial import END_LIMIT_S, Launcher, RunningTrial, Trial, Workload
from lockstep.errors import ReplicaError
from lockstep.extras import require
from lockstep.parent_death import ParentDeathGuard

_PACKAGES = tuple(Path(file).parent for file in (lockstep.__file__, lockstep_tools.__file__, __file__))
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED of a Unix socket's other end: process, user, group
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception)\b")
_STOP_LIMIT_S = 10.0


def write_inputs(workload: Workload, batches: int, path: Path) -> None:
    """Writes the different ones of so many global batches as an ``.npz`` file of arrays [different, rows, ...].

    The targets are ``y``; the inputs are ``x``, or have the names that the module's arguments have.
    """
    numpy = require("numpy", "images")
    # A batch that comes again is the same object.
    different = {id(batch): batch for batch in workload.make_batches(batches)}.values()
    named = [{**(x if isinstance(x, dict) else {"x": x}), "y": y} for x, y in different]
    numpy.savez(path, **{name: numpy.stack([batch[name].numpy() for batch in named]) for name in named[0]})


@dataclass(frozen=True, kw_only=True)
class Program(Launcher):
    """Runs a program of another environment, which starts the trial's processes in its framework's own way."""

    python: Path  # the environment's interpreter
    script: Path  # the program; its one argument is the job
    arguments: tuple[str, ...] = ()  # between the interpreter and the script, such as ``-m`` and a launcher
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables for its framework

    def launch(self, trial: Trial, folder: Path) -> RunningTrial:
        """Writes the batches and starts the program, which imports the packages from the folder."""
        inputs, socket_path, guard = folder / "inputs.npz", folder / "harness", ParentDeathGuard()
        for package in _PACKAGES:
            (folder / package.name).symlink_to(package)
        write_inputs(trial.workload, trial.warm_up + trial.steps, inputs)
        job = {
            "workload": trial.workload.name,
            "replicas": trial.contender.replicas,
            "layout": trial.contender.layout,
            "warm_up": trial.warm_up,
            "steps": trial.steps,
            "lap": trial.lap,
            "threads": trial.threads_per_process,
            "learning_rate": trial.workload.learning_rate,
            "count": trial.workload.count,
            "inputs": str(inputs),
            "source": str(folder),
            "socket": str(socket_path),
            "started_s": time.monotonic(),
            "guard": guard.path,
        }
        variables = [f"{name}={value}" for name, value in {"PYTHONPATH": str(folder), **self.variables}.items()]
        command = [str(self.python.absolute()), *self.arguments, str(self.script.absolute()), json.dumps(job)]
        return _ProgramTrial(["env", *variables, *command], trial, socket_path, guard)


class _ProgramTrial(RunningTrial):
    def __init__(self, command: list[str], trial: Trial, socket_path: Path, guard: ParentDeathGuard) -> None:
        self._trial, self._guard = trial, guard
        self._connections: list[socket.socket] = []  # one of each process that trains
        self._done = False
        with ExitStack() as stack:
            stack.callback(guard.kill)
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(socket_path))
            self._listener.listen()
            self._output = stack.enter_context(tempfile.TemporaryFile())
            out, none = self._output, subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(command, stdin=none, stdout=out, stderr=out, start_new_session=True)
            except OSError as error:
                raise ReplicaError(f"{trial.name} could not be started: {error}") from error
            self._resources = stack.pop_all()

    @property
    def pids(self) -> list[int]:
        return [_pid_behind(connection) for connection in self._connections]

    def records(self) -> list[StepRecord]:
        limit_s = self._trial.contender.limit_s
        limit = time.monotonic() + limit_s
        records: list[StepRecord] = []
        waiting: list[socket.socket] = []
        ended = os.pidfd_open(self._process.pid)
        try:
            while len(records) < self._trial.contender.processes:
                ready = wait([self._listener, *waiting, ended], max(0.0, limit - time.monotonic()))
                if not ready:
                    raise ReplicaError(self._trial.too_slow)
                if ready == [ended]:
                    raise self._failure()
                done = [connection for connection in waiting if connection in ready]
                records += [self._receive(connection) for connection in done]
                waiting = [connection for connection in waiting if connection not in done]
                if self._listener in ready:
                    connection, _ = self._listener.accept()
                    connection.settimeout(limit_s)
                    self._connections.append(connection)
                    waiting.append(connection)
        finally:
            os.close(ended)
        self._done = True
        return records

    def end(self) -> None:
        handles = []
        for pid in self.pids:
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
        with self._resources:
            for connection in self._connections:
                connection.close()
            if not (self._done and self._ends_within(END_LIMIT_S)):
                # Asks the program first, so that a launcher can end its own processes, and then kills what is left.
                self._signal_group(signal.SIGTERM)
                self._ends_within(_STOP_LIMIT_S)
                self._signal_group(signal.SIGKILL)
                self._process.wait()
            self._guard.kill()  # also those that the launcher has put into sessions of their own
            for handle in handles:
                wait([handle], _STOP_LIMIT_S)
                os.close(handle)

    def _receive(self, connection: socket.socket) -> StepRecord:
        with connection.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            raise self._failure()
        return record_of(line)

    def _failure(self) -> ReplicaError:
        """The error for a process that ended too early, with the last exception that the program printed."""
        self._ends_within(_STOP_LIMIT_S)
        self._output.seek(0)
        reason = _last_error(self._output.read().decode(errors="replace"))
        return ReplicaError(f"{self._trial.name} ended before its last step: {reason}")

    def _ends_within(self, limit_s: float) -> bool:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of them are gone
            os.killpg(self._process.pid, number)


def _pid_behind(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def record_of(line: bytes) -> StepRecord:
    """The record that a process sent; raises ReplicaError if the line is none."""
    try:
        values: dict[str, Any] = json.loads(line)
        values |= {name: tuple(values[name]) for name in ("step_s", "exchange_s", "notes") if name in values}
        return StepRecord(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ReplicaError(f"a program sent {line[:60]!r}, expected JSON as benchmarks/step_timer.py has it") from error


def _last_error(output: str) -> str:
    """The last exception that a program printed, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _EXCEPTION.match(line)]
    return (errors or lines or ["it printed nothing"])[-1]
