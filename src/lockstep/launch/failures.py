"""How a worker failed, by the record that it wrote or the signal that ended it, and which worker failed first."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.errors import LockstepError
from lockstep.tracebacks import format_for_user


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """What a worker writes down about the error that ends it."""

    at_ns: int  # when it was raised, by ``time.monotonic_ns``, which all processes of a host share
    error: str  # the type and the message: "ValueError: no such file"
    traceback: str  # the traceback as it is printed

    @classmethod
    def of(cls, error: BaseException, *, hide: Collection[str]) -> FailureRecord:
        """The record of an error that was raised just now, without frames of the files in ``hide`` at its start."""
        at_ns = time.monotonic_ns()
        user_frames = without_frames(error.__traceback__, hide)
        message = " ".join(str(error).split())
        return cls(
            at_ns=at_ns,
            error=f"{type(error).__name__}: {message}".removesuffix(": "),
            traceback=format_for_user(error, user_frames, LockstepError),
        )

    @property
    def kind(self) -> str:
        """The type of the error."""
        return self.error.partition(":")[0]

    @property
    def origin(self) -> tuple[str, ...]:
        """The type of the error and the lines that led to it: the same in all workers that make one mistake."""
        return (self.kind, *(line for line in self.traceback.splitlines() if line.startswith('  File "')))

    def write(self, path: Path) -> None:
        """Writes the record whole or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> FailureRecord | None:
        """The record at ``path``; None if the worker wrote none, or was killed meanwhile."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The failure of one worker."""

    worker: int  # its rank among the workers of all hosts
    attempt: int  # how often the workers had been restarted
    exit_code: int | None  # as ``subprocess`` gives it: negative for a signal; None if it had not ended
    at_ns: int  # when it failed: the time in its record, else when it ended
    record: FailureRecord | None = None  # what it wrote down; None if it was killed or ended without an error

    @property
    def what(self) -> str:
        """What happened, to stand after the worker's name."""
        if self.record is not None:
            return f"failed: {self.record.error}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"was killed by {_signal_name(-self.exit_code)}"
        if self.exit_code == 0:
            return "ended before it returned"
        return f"ended with exit code {self.exit_code}"

    @property
    def what_below_traceback(self) -> str:
        """The same in short, to stand below the traceback, which has the message."""
        if self.record is None or self.record.kind == "SystemExit":
            return self.what
        return f"failed with the {self.record.kind} above"

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would show: 128 plus the signal's number for a signal.

        After an error it is 1, though a gloo thread may abort the process during Python's shutdown.
        """
        if self.exit_code is None or self.record is not None:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code or 1


def worker_failures(
    exit_codes: Mapping[int, int | None],
    ended_ns: Mapping[int, int],
    records: Mapping[int, FailureRecord | None],
    *,
    first_worker: int,
    attempt: int,
) -> list[WorkerFailure]:
    """How each worker of a host ended that the launcher has not ended. Pure.

    All mappings are by local rank. ``exit_codes`` has None for a worker that still runs, ``ended_ns`` only those that
    were not ended by the launcher; ``first_worker`` is the rank of this host's first worker.
    """
    failures = []
    for local, code in exit_codes.items():
        record = records.get(local)
        at_ns = record.at_ns if record is not None else ended_ns.get(local)
        if at_ns is not None:
            worker = first_worker + local
            failures.append(WorkerFailure(worker=worker, attempt=attempt, exit_code=code, at_ns=at_ns, record=record))
    return failures


def first_failure(failures: Iterable[WorkerFailure]) -> WorkerFailure | None:
    """The failure that came before all others on a host; the others are usually its consequences. Pure."""
    # A function's process with exit code 0 ended before it returned; if another failed, that one is the cause.
    return min(failures, key=lambda failure: (failure.exit_code == 0, failure.at_ns), default=None)


def without_frames(traceback: TracebackType | None, files: Collection[str]) -> TracebackType | None:
    """A traceback without its first frames as far as they are in ``files``; the whole one if all of them are."""
    frame = traceback
    while frame is not None and frame.tb_frame.f_code.co_filename in files:
        frame = frame.tb_next
    return frame if frame is not None else traceback


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
