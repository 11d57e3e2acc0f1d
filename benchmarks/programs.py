"""Trials in another Python: a program that knows nothing of this package but the stopwatch, and may have no torch.

    job, as JSON on the command line ->  program  -> each process that trains: one line of JSON on a Unix socket, inside
                                                     its last step, and then it waits until we close the socket

The socket also says which processes train, whoever started them: a framework's launcher comes between us and them.
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

from torch import Tensor

import lockstep
from benchmarks.step_timer import StepRecord
from benchmarks.trial import END_LIMIT_S, TRIAL_LIMIT_S, Batch, Launcher, RunningTrial, Trial, Workload, too_slow
from lockstep.errors import ReplicaError
from lockstep.extras import require
from lockstep.parent_death import ParentDeathGuard


def write_inputs(workload: Workload, batches: int, path: Path) -> None:
    """Writes the different ones of so many global batches as an ``.npz`` file of arrays [different, rows, ...].

    The targets are ``y``; the inputs are ``x``, or have the names that the module's arguments have.

    Args:
        workload: whose batches.
        batches: how many are trained on; a batch that comes again is the same object.
        path: of the file.
    """
    numpy = require("numpy", "images")
    different = list({id(batch): batch for batch in workload.make_batches(batches)}.values())
    parts = [_named(batch) for batch in different]
    numpy.savez(path, **{name: numpy.stack([part[name].numpy() for part in parts]) for name in parts[0]})


def _named(batch: Batch) -> dict[str, Tensor]:
    x, y = batch
    inputs: dict[str, Any] = x if isinstance(x, dict) else {"x": x}
    return {**inputs, "y": y}


_PACKAGES = (Path(lockstep.__file__).parent, Path(__file__).parent)
_CREDENTIALS = struct.Struct("3i")  # what Linux tells of a Unix socket's other end: process, user, group
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception)\b")
_STOP_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Program(Launcher):
    """Runs a program of another environment, which starts the trial's processes in its framework's own way.

    Args:
        python: the environment's interpreter.
        words: what stands between the interpreter and the script, such as ``-m`` and a launcher with its options.
        script: the program; it is given one argument, the job.
        options: settings for the program, handed on as they are.
        variables: environment variables that its framework reads when it is imported.
        takes_batches: whether the workload's batches are written for it; a program of this package makes its own.
    """

    python: Path
    script: Path
    words: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    takes_batches: bool = True

    def launch(self, trial: Trial, folder: Path) -> RunningTrial:
        """Writes the batches and starts the program, which imports both packages from the folder."""
        inputs = folder / "inputs.npz"
        for package in _PACKAGES:
            (folder / package.name).symlink_to(package)
        if self.takes_batches:
            write_inputs(trial.workload, trial.warm_up + trial.steps, inputs)
        lifeline = ParentDeathGuard()
        job = {**self._job(trial, folder, inputs), "lifeline": lifeline.path}
        variables = [f"{name}={value}" for name, value in {"PYTHONPATH": str(folder), **self.variables}.items()]
        command = [str(self.python.absolute()), *self.words, str(self.script.absolute()), json.dumps(job)]
        return _ProgramTrial(["env", *variables, *command], trial, folder, lifeline)

    def _job(self, trial: Trial, folder: Path, inputs: Path) -> dict[str, Any]:
        return {
            "workload": trial.workload.name,
            "replicas": trial.contender.shares,
            "layout": trial.contender.layout,
            "warm_up": trial.warm_up,
            "steps": trial.steps,
            "threads": trial.threads_per_process,
            "learning_rate": trial.workload.learning_rate,
            "count": trial.workload.count,
            "options": dict(self.options),
            "inputs": str(inputs),
            "source": str(folder),
            "socket": str(_socket(folder)),
            "started_s": time.monotonic(),
        }


class _Member:
    """One process that trains, as its connection shows it."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        self.connection = connection
        self.handle = os.pidfd_open(self.pid)  # names this very process even when it is gone and its number taken

    def end(self) -> None:
        """Kills the process if it does not end by itself; its launcher has ended before."""
        if not wait([self.handle], _STOP_LIMIT_S):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.close(self.handle)


class _ProgramTrial(RunningTrial):
    def __init__(self, command: list[str], trial: Trial, folder: Path, lifeline: ParentDeathGuard) -> None:
        self._trial = trial
        self._members: list[_Member] = []
        self._done = False
        with ExitStack() as stack:
            stack.callback(lifeline.kill)
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(_socket(folder)))
            self._listener.listen()
            self._output = stack.enter_context(tempfile.TemporaryFile())
            self._process = _started(command, self._output, trial)
            self._resources = stack.pop_all()

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def records(self) -> list[StepRecord]:
        limit = time.monotonic() + TRIAL_LIMIT_S
        records: list[StepRecord] = []
        waiting: dict[socket.socket, _Member] = {}
        with ExitStack() as stack:
            ended = os.pidfd_open(self._process.pid)
            stack.callback(os.close, ended)
            while len(records) < self._trial.contender.processes:
                ready = wait([self._listener, *waiting, ended], max(0.0, limit - time.monotonic()))
                if not ready:
                    raise ReplicaError(too_slow(self._trial))
                if ready == [ended]:
                    raise self._failure()
                if self._listener in ready:
                    member = self._admit()
                    waiting[member.connection] = member
                records += [self._receive(connection) for connection in list(waiting) if connection in ready]
                waiting = {connection: waiting[connection] for connection in waiting if connection not in ready}
        self._done = True
        return records

    def end(self) -> None:
        with self._resources:
            for member in self._members:
                member.connection.close()
            if not (self._done and _ends_within(self._process, END_LIMIT_S)):
                self._stop()
            for member in self._members:
                member.end()

    def _admit(self) -> _Member:
        connection, _ = self._listener.accept()
        connection.settimeout(TRIAL_LIMIT_S)
        self._members.append(_Member(connection))
        return self._members[-1]

    def _receive(self, connection: socket.socket) -> StepRecord:
        with connection.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            raise self._failure()
        return record_of(line)

    def _failure(self) -> ReplicaError:
        """What to say of a process that ended too early, with the program's last words, once it has said them."""
        _ends_within(self._process, _STOP_LIMIT_S)
        self._output.seek(0)
        words = _last_words(self._output.read().decode(errors="replace"))
        return ReplicaError(f"{self._trial.name} ended before its last step: {words}")

    def _stop(self) -> None:
        """Asks the program to end, so that a launcher can end its own processes, and then kills what is left."""
        _signal_group(self._process, signal.SIGTERM)
        _ends_within(self._process, _STOP_LIMIT_S)
        _signal_group(self._process, signal.SIGKILL)
        self._process.wait()


def record_of(line: bytes) -> StepRecord:
    """The record that a process sent.

    Raises:
        ReplicaError: the line is none.
    """
    try:
        values = json.loads(line)
        lists = {name: tuple(values[name]) for name in ("step_s", "exchange_s", "notes") if name in values}
        return StepRecord(**{**values, **lists})
    except (ValueError, TypeError, KeyError) as error:
        raise ReplicaError(f"a program sent {line[:60]!r}, expected JSON as benchmarks/step_timer.py has it") from error


def _socket(folder: Path) -> Path:
    return folder / "harness"


def _started(command: list[str], output: Any, trial: Trial) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise ReplicaError(f"{trial.name} could not be started: {error}") from error


def _ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, number)


def _last_words(output: str) -> str:
    """The last exception that a program printed, or else its last line."""
    said = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in said if _EXCEPTION.match(line)]
    return (errors or said or ["it said nothing"])[-1]
