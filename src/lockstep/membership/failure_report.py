"""Why a job ended early, in the one form that every worker raises. Pure.

The first report wins: whichever worker finds the cause writes it to the store once, and all others read it. A worker
that had nothing to do with the lost one therefore raises the same sentence as the worker that waited for it.
"""

from __future__ import annotations

import json
import threading
import traceback as tracebacks
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.errors import ClusterError
from lockstep.tracebacks import frames_of_one_device

_TRACEBACK_LINES = 12
MESSAGE_LENGTH = 600
"""To how many characters the message of another error is cut in a report."""


EXIT_OF_SURVIVOR = 138
"""The exit code of a worker that ends because another one was lost or has failed.

Operators of Kubernetes take codes up to 127 for permanent failures: with restartPolicy ExitCode, Kubeflow's training
operator starts a pod again whose code is at least 128 (its pkg/util/train/train_util.go). 138 is that of SIGUSR1.
"""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that an uncaught exception ends: that of the first ClusterError that led to it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ClusterError):
        cause = cause.__cause__
    return 1 if cause is None else cause.exit_code


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """The cause of a job's early end."""

    worker: int  # the rank of the worker that was lost or failed
    reporter: int  # the rank of the worker that wrote the report
    reason: str  # the sentence that all workers raise
    traceback: str = ""  # the last lines of the failed worker's traceback; empty if no exception ended it
    permanent: bool = False  # whether the same processes, started again, would fail in the same way

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FailureReport:
        """Reads a report from the store. An unreadable report still ends the job."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls(worker=-1, reporter=-1, reason=f"the job ended with an unreadable report: {text[:200]!r}")

    def error(self, addition: str = "") -> ClusterError:
        """A new error to raise: raising an exception modifies it, so each caller needs its own."""
        error = ClusterError(self.reason + addition)
        error.exit_code = 1 if self.permanent else EXIT_OF_SURVIVOR
        if self.traceback:
            error.add_note(f"Traceback of worker {self.worker}, its last lines:\n{self.traceback}")
        return error


class JobStatus:
    """Whether the job goes on, as this worker knows it. The first failure report is kept for good."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._failure: FailureReport | None = None
        self._callbacks: list[Callable[[ClusterError], None]] = []

    @property
    def failure(self) -> FailureReport | None:
        """Why the job ended; None while it goes on."""
        return self._failure

    def fail(self, report: FailureReport, *, notify: bool = True) -> FailureReport:
        """Keeps the report and calls the subscribers, unless there is one already. Returns the one that is kept."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = report
            callbacks, self._callbacks = self._callbacks, []
        self._ended.set()
        # Called without the lock: a callback may ask for the failure, or subscribe another one.
        for callback in callbacks if notify else ():
            callback(report.error())
        return report

    def subscribe(self, callback: Callable[[ClusterError], None]) -> None:
        """Has ``callback`` called once when the job fails, or now if it has failed. It must not raise."""
        with self._lock:
            if (report := self._failure) is None:
                self._callbacks.append(callback)
                return
        callback(report.error())

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)


def describe_exception(name: str, error: BaseException, status: str) -> str:
    """The reason for a worker that an exception ended."""
    where = f"; it was in {status}" if status else ""
    if isinstance(error, KeyboardInterrupt):
        return f"{name} was interrupted (Ctrl-C){where}"
    if isinstance(error, SystemExit):
        return f"{name} ended itself with exit code {error.code or 0}{where}"
    message = " ".join(str(error).split())[:MESSAGE_LENGTH]
    # A note over several lines is a traceback, which the report has in a field of its own.
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()) if "\n" not in note)
    return f"{name} failed with {type(error).__name__}{': ' if message else ''}{message}{notes}{where}"


def describe_loss(name: str, how: str, status: str) -> str:
    """The reason for a lost worker, such as one without a heartbeat for some seconds."""
    return (
        f"{name} is lost: {how} (last status: {status or 'unknown'}). "
        "It was killed or stopped, or its network failed; look at its output and its machine"
    )


def last_traceback_lines(error: BaseException) -> str:
    """The last lines of the traceback of an exception's first cause, with the innermost call."""
    # The message is that of the last error, and the place to look at is that of the first.
    while error.__cause__ is not None:
        error = error.__cause__
    user_frames = frames_of_one_device(error.__traceback__)
    lines = "".join(tracebacks.format_exception(type(error), error, user_frames, chain=False)).rstrip().splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:])
