"""How a worker failed: what it wrote down itself, or the signal that ended it; and which worker was the first."""

from __future__ import annotations

import faulthandler
import json
import signal
import time
import traceback as tracebacks
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a worker writes down about the error that ends it.

    Args:
        at_ns: when, by the clock that all processes of a host share (``time.monotonic_ns``).
        error: the type and the message: "ValueError: no such file".
        traceback: the whole of it, as Python prints it.
    """

    at_ns: int
    error: str
    traceback: str

    def write(self, path: Path) -> None:
        """Writes it where ``read`` finds it, whole or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """What the worker wrote; None if it wrote nothing, or was killed while it did."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    @classmethod
    def of(cls, error: BaseException, *, hide: Collection[str]) -> Record:
        """The record of an error that was raised just now.

        Args:
            error: what was raised.
            hide: source files whose lines at the start of the traceback are left out.
        """
        at_ns = time.monotonic_ns()
        shown = without_frames(error.__traceback__, hide)
        said = " ".join(str(error).split())
        return cls(
            at_ns=at_ns,
            error=f"{type(error).__name__}: {said}".removesuffix(": "),
            traceback="".join(tracebacks.format_exception(type(error), error, shown)),
        )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one worker.

    Args:
        worker: its number among the workers of all hosts.
        attempt: how often the workers had been started again.
        exit_code: as ``subprocess`` gives it: negative for a signal; None where it had not ended.
        at_ns: when it failed: when it said so, else when it ended.
        record: what it wrote down; None if it was killed or ended without an error.
    """

    worker: int
    attempt: int
    exit_code: int | None
    at_ns: int
    record: Record | None = None

    @property
    def what(self) -> str:
        """What happened to it, to stand after its name."""
        if self.record is not None:
            return f"failed: {self.record.error}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"was killed by {_signal_name(-self.exit_code)}"
        if self.exit_code == 0:
            return "ended before it returned"
        return f"ended with exit code {self.exit_code}"

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would show: 128 and the signal's number for a signal.

        After an error it is 1, though a gloo thread may abort the process while Python takes it down.
        """
        if self.exit_code is None or self.record is not None:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code or 1


def without_frames(traceback: TracebackType | None, files: Collection[str]) -> TracebackType | None:
    """A traceback without its first lines, as far as they are in ``files``; whole if all of them are."""
    shown = traceback
    while shown is not None and shown.tb_frame.f_code.co_filename in files:
        shown = shown.tb_next
    return shown if shown is not None else traceback


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(
    exit_codes: Mapping[int, int | None],
    ended_ns: Mapping[int, int],
    records: Mapping[int, Record | None],
    *,
    first_worker: int,
    attempt: int,
) -> Failure | None:
    """The failure that came before all others of a host; those others are its victims as a rule. Pure.

    Args:
        exit_codes: of every local worker; None for one that still runs.
        ended_ns: when those ended that did so by themselves, not because the launcher ended them.
        records: what local workers wrote down.
        first_worker: the number, among the workers of all hosts, of this host's first.
        attempt: how often they were started again.
    """
    failures = []
    for local, code in exit_codes.items():
        record = records.get(local)
        at_ns = record.at_ns if record is not None else ended_ns.get(local)
        if at_ns is not None:
            worker = first_worker + local
            failures.append(Failure(worker=worker, attempt=attempt, exit_code=code, at_ns=at_ns, record=record))
    # A function's process that ended with 0 ended before it returned; where another failed, that one is the cause.
    return min(failures, key=lambda failure: (failure.exit_code == 0, failure.at_ns), default=None)


_BEFORE = 0.1  # of the time that is left
_BEFORE_S = 2.0  # and no more: eight workers on two cores take one second to write


@contextmanager
def stacks_noted(path: Path, until: float | None) -> Iterator[None]:
    """While inside: writes what all threads of this process are doing to ``path`` when it is nearly ``until``.

    Args:
        path: the file.
        until: on the clock of ``time.monotonic``, which all processes of a host share; None writes nothing.
    """
    if until is None:
        yield
        return
    left_s = max(0.0, until - time.monotonic())
    with path.open("w") as file:
        faulthandler.dump_traceback_later(max(0.01, left_s - min(_BEFORE_S, _BEFORE * left_s)), file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def read_stacks(paths: dict[int, Path]) -> str:
    """What the workers wrote, each under its number; empty where none did.

    Args:
        paths: the files, by worker.
    """
    written = {worker: path.read_text().strip() for worker, path in paths.items() if path.exists()}
    return "\n\n".join(f"worker {worker} stood here:\n{stacks}" for worker, stacks in written.items() if stacks)
