"""The end of a job as one worker knows it: set once, and told to whoever waits for it in this process."""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.errors import ClusterError

_LINES_OF_TRACEBACK = 12
_LONGEST_MESSAGE = 600
# Where it stands in gloo's source, and what to ask the author of the program.
_GLOO_S_ADVICE = re.compile(r"^\[\S+\] |\. This is typically caused by .*")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The cause of a job's end.

    Args:
        worker: whose end it was, for those who need not wait for it any longer.
        found_by: the worker that says so.
        reason: the one sentence that all workers raise.
        trace: the last lines of the failed worker's traceback, if it failed by an exception.
    """

    worker: int
    found_by: int
    reason: str
    trace: str = ""

    def to_text(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self), sort_keys=True)

    def error(self, addition: str = "") -> ClusterError:
        """The error to raise: a new one each time, since raising one writes into it."""
        error = ClusterError(self.reason + addition)
        if self.trace:
            error.add_note(f"Traceback of worker {self.worker}, its last lines:\n{self.trace}")
        return error


def read_ending(text: str) -> Ending:
    """An ending as it was kept in the store; one that cannot be read is still an ending."""
    try:
        return Ending(**json.loads(text))
    except (ValueError, TypeError):
        return Ending(
            worker=-1, found_by=-1, reason=f"the job was ended, with words that cannot be read: {text[:200]!r}"
        )


def describe_failure(name: str, error: BaseException, doing: str) -> str:
    """The sentence for a worker that ended by an exception."""
    place = f"; it was in {doing}" if doing else ""
    if isinstance(error, KeyboardInterrupt):
        return f"{name} was interrupted (Ctrl-C){place}"
    if isinstance(error, SystemExit):
        return f"{name} ended itself with exit code {error.code or 0}{place}"
    message = " ".join(str(error).split())[:_LONGEST_MESSAGE]
    notes = "".join(f" [{note}]" for note in getattr(error, "__notes__", ()) if "\n" not in note)
    return f"{name} failed with {type(error).__name__}{': ' if message else ''}{message}{notes}{place}"


def describe_loss(name: str, silent_s: float, doing: str) -> str:
    """The sentence for a worker of which nothing is heard any more."""
    last = f"what it last did: {doing or 'unknown'}"
    return (
        f"{name} is lost: nothing has been heard of it for {silent_s:.1f} s ({last}). "
        "It was killed or stopped, or its network is cut; look at its own output and its machine"
    )


def describe_lost_launcher(launcher: str, how: str) -> str:
    """The sentence for a launcher that serves the store, when the store is gone."""
    return (
        f"{launcher}, which serves the job's store, is lost: {how}. "
        "It was ended, or the network to it is cut; look at its output"
    )


def describe_broken_link(name: str, other: str, waiting_in: str, message: str) -> str:
    """The sentence for a connection between two workers that broke, though both are there."""
    ends = f"{name} and {other}" if other else f"{name} and another worker"
    return (
        f"{ends} do not reach each other any more though both still answer, so the network between them is at fault; "
        f"{name} waited in {waiting_in}: {_GLOO_S_ADVICE.sub('', ' '.join(message.split()))[:_LONGEST_MESSAGE]}"
    )


def describe_early_end(left: str, name: str, doing: str, addition: str) -> str:
    """The sentence for a worker that ended in good order while another still waits for it."""
    last = f" (what it last did: {doing})" if doing else ""
    return (
        f"{left} has ended while {name} still waits for it{last}{addition}; "
        "every worker must run the same number of steps and make the same calls"
    )


def describe_lost_store(name: str, how: str, doing: str) -> str:
    """The sentence for the worker that serves the store, when the store is gone."""
    last = f"what it last did: {doing or 'unknown'}"
    return (
        f"{name}, which serves the job's store, is lost: {how} ({last}). "
        "It was killed or stopped, or the network to it is cut; look at its own output and its machine"
    )


def shorten_traceback(error: BaseException) -> str:
    """The last lines of an exception's traceback, or of that of its first cause: the innermost call among them."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = "".join(traceback.format_exception(error, chain=False)).rstrip().splitlines()
    return "\n".join(lines[-_LINES_OF_TRACEBACK:])


Callback = Callable[[ClusterError], None]


class JobEnd:
    """Nothing, until the first cause of the job's end is known; then that cause, for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ending: Ending | None = None
        self._callbacks: list[Callback] = []

    @property
    def ending(self) -> Ending | None:
        """The cause; None while the job goes on."""
        return self._ending

    def conclude(self, ending: Ending, *, tell: bool = True) -> Ending:
        """Notes the cause, unless there is one; calls those who subscribed, if ``tell``. The cause that stands."""
        with self._changed:
            if self._ending is not None:
                return self._ending
            self._ending = ending
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        if tell:
            for callback in callbacks:
                callback(ending.error())
        return ending

    def subscribe(self, callback: Callback) -> None:
        """Has ``callback`` called once, by whoever finds the end; at once if it is known. It must not raise."""
        with self._changed:
            if (ending := self._ending) is None:
                self._callbacks.append(callback)
                return
        callback(ending.error())

    def wake(self) -> None:
        """Lets those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, limit_s: float) -> None:
        """Waits until the cause is known, or somebody calls ``wake``, or the time is over."""
        with self._changed:
            if self._ending is None:
                self._changed.wait(limit_s)
