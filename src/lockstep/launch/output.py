"""What the workers print: into a log file each, and on to the terminal as it comes.

worker 1: stdout --> pipe ---+                             +--> worker-1.log   stdout and stderr in the order they came
                             +--> OutputForwarder (thread) +
worker 1: stderr --> pipe ---+                             +--> ChiefOutput or AllOutput: the terminal, a notebook
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from lockstep.console import fill_error
from lockstep.launch.worker import WorkerPaths

StatusCallback = Callable[[str], None]
"""Takes one line about what happens, for the person who waits."""

Stream = Literal["out", "err"]
STREAMS: tuple[Stream, Stream] = ("out", "err")
_STREAM_NAMES: dict[Stream, str] = {"out": "standard output", "err": "standard error"}
_CHUNK = 1 << 16


def complain(line: str) -> None:
    """Writes a line of ours to standard error, if there is still one."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(fill_error(f"lockstep: {line}") + "\n")
            sys.stderr.flush()


class Terminal:
    """Shows workers' output on this process's standard output and error. No method raises.

    After a first failure nothing more is written to that stream, and one line says why: the workers would otherwise
    block on pipes that nobody reads.
    """

    def __init__(self) -> None:
        self._to: dict[Stream, TextIO | None] = {"out": sys.stdout, "err": sys.stderr}
        self._broken: set[Stream] = set()

    def write(self, stream: Stream, text: str) -> None:
        """Writes and flushes. A character that the stream cannot encode is escaped."""
        to = self._to[stream]
        if stream in self._broken or not text:
            return
        try:
            if to is None:
                raise ValueError("this process has none")
            try:
                to.write(text)
            except UnicodeEncodeError as error:
                to.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            to.flush()
        except Exception as error:  # noqa: BLE001 - a notebook's or a user's stream may raise anything
            self._broken.add(stream)
            complain(
                f"cannot show the workers' {_STREAM_NAMES[stream]} any more ({type(error).__name__}: {error}); the "
                "workers go on, and their log files, if any, have all of it"
            )


class ChiefOutput:
    """Shows the chief's output as it comes, so that progress bars work."""

    def shows_pieces(self, worker: int) -> bool:
        """Whether a worker's output is shown before its line is complete."""
        return worker == 0

    def __init__(self) -> None:
        self._terminal = Terminal()
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"out": make("replace"), "err": make("replace")}  # a character may come in two pieces

    def write(self, worker: int, stream: Stream, data: bytes) -> None:
        """Takes what a worker has just printed; a line may come in pieces."""
        if worker == 0:
            self._terminal.write(stream, self._decoders[stream].decode(data))

    def finish(self) -> None:
        """Called when nothing more will come."""


class AllOutput:
    """Shows whole lines of all workers, each after its worker's rank; of a progress bar, only the last state."""

    def __init__(self) -> None:
        self._terminal = Terminal()
        self._partial: dict[tuple[int, Stream], bytes] = {}

    def shows_pieces(self, worker: int) -> bool:
        """Not of any worker: lines of several would be mixed."""
        return False

    def write(self, worker: int, stream: Stream, data: bytes) -> None:
        *lines, rest = (self._partial.pop((worker, stream), b"") + data).split(b"\n")
        for line in lines:
            self._write_line(worker, stream, line)
        if rest:
            self._partial[worker, stream] = rest

    def finish(self) -> None:
        for (worker, stream), line in self._partial.items():
            self._write_line(worker, stream, line)

    def _write_line(self, worker: int, stream: Stream, line: bytes) -> None:
        text = last_state(line).decode(errors="replace").rstrip("\r")
        self._terminal.write(stream, f"[{worker}] {text}\n")


def last_state(line: bytes) -> bytes:
    """What is seen last of a line that was overwritten, as that of a progress bar."""
    text = line.rstrip(b"\r")
    return text.rpartition(b"\r")[2] + line[len(text) :]


class LastStates:
    """What of a stream goes into a log: of a line that overwrites itself the last state, when the line is complete.

    Other output passes as it comes. A bar draws itself ten times a second, which would be 4 MB an hour.
    """

    def __init__(self) -> None:
        self._line = b""  # what has come of a line that overwrites itself

    def take(self, data: bytes) -> bytes:
        """Takes what was printed; returns what goes into the log now."""
        *lines, rest = (self._line + data).split(b"\n")
        complete = b"".join(last_state(line) + b"\n" for line in lines)
        self._line = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :] if b"\r" in rest else b""
        return complete + (b"" if self._line else rest)

    def finish(self) -> bytes:
        """The state of a line that was not completed."""
        return last_state(self._line)


@dataclass(frozen=True, kw_only=True)
class _Source:
    worker: int
    stream: Stream
    log: BinaryIO | None
    states: LastStates = field(default_factory=LastStates)


def _only_for_owner(path: str, flags: int) -> int:
    """Opens a file that other users cannot read if it is new: programs print tokens and paths."""
    return os.open(path, flags, 0o600)


class OutputForwarder:
    """Reads the pipes of all workers in a thread of its own. Its maker calls ``close`` when they have ended."""

    def __init__(self, *, logs: Path | None, sink: ChiefOutput | AllOutput) -> None:
        self._logs, self._sink = logs, sink
        self._incomplete_logs: set[BinaryIO] = set()
        self._sources: dict[int, _Source] = {}  # by reading end
        self._writing_ends: list[int] = []  # held open, so that no pipe is at its end while it is read
        self._files: list[BinaryIO] = []
        self._wake_read, self._wake_write = os.pipe()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._forward, name="lockstep-launch-output", daemon=True)
        self._thread.start()

    def shows_pieces(self, worker: int) -> bool:
        """Whether a worker's output is shown before its line is complete."""
        return self._sink.shows_pieces(worker)

    def open(self, worker: int, attempt: int) -> dict[Stream, str]:
        """Makes the pipes of a worker and begins to read them; returns their paths, to open for writing."""
        log = None
        if self._logs is not None:
            path = WorkerPaths(self._logs, worker, attempt).log
            log = open(path, "ab", buffering=0, opener=_only_for_owner)  # noqa: SIM115  Path.open has no opener
            self._files.append(log)
        paths: dict[Stream, str] = {}
        for stream in STREAMS:
            reading, writing = os.pipe()
            # Workers of functions are forked from another process, which inherits no descriptor of this one; by this
            # path they can open it.
            paths[stream] = f"/proc/{os.getpid()}/fd/{writing}"  # for any process of this user
            # Closing pipes reads them empty without waiting for an end: processes that a worker left running may hold
            # them open for hours.
            os.set_blocking(reading, False)
            with self._lock:
                self._writing_ends.append(writing)
                self._sources[reading] = _Source(worker=worker, stream=stream, log=log)
        # The thread sleeps in ``poll`` with the descriptors that it had; a byte in its own pipe makes it take the new
        # ones.
        os.write(self._wake_write, b"+")
        return paths

    def close_pipes(self) -> None:
        """Forwards what has been printed and not read yet, and closes the pipes and logs of all workers so far.

        Does not wait for the pipes to close: a process that a worker left running may hold them open.
        """
        self._closed.clear()
        os.write(self._wake_write, b"0")
        self._closed.wait()

    def close(self) -> None:
        """Forwards what has been printed and not read yet, and ends the thread.

        Closes the pipes as ``close_pipes`` does.
        """
        os.write(self._wake_write, b"-")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _forward(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {handle for handle, _ in poll.poll()}
            if self._wake_read in ready:
                requests = os.read(self._wake_read, _CHUNK)
                with self._lock:
                    handles = list(self._sources)
                for handle in handles:
                    poll.register(handle, select.POLLIN)
                if b"0" in requests or b"-" in requests:
                    for handle in handles:
                        poll.unregister(handle)
                    self._close_sources(handles)
                    ready = {self._wake_read}
                if b"-" in requests:
                    break
            # In the order out, err: what a worker printed before it raised comes before its traceback.
            for handle in sorted(ready - {self._wake_read}):
                self._read(handle)
        self._sink.finish()

    def _close_sources(self, handles: list[int]) -> None:
        """Forwards what can be read now, and closes all pipes and logs."""
        for handle in handles:
            while self._read(handle):
                pass
            source = self._sources[handle]
            if source.log is not None:
                self._write_log(source.log, source.states.finish())
        for handle in (*handles, *self._writing_ends):
            os.close(handle)
        for file in self._files:
            file.close()
        self._sources.clear()
        self._writing_ends.clear()
        self._files.clear()
        self._closed.set()

    def _read(self, handle: int) -> bool:
        """Forwards one chunk; whether there was anything."""
        source = self._sources[handle]
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        if source.log is not None:
            self._write_log(source.log, source.states.take(data))
        self._sink.write(source.worker, source.stream, data)
        return True

    def _write_log(self, log: BinaryIO, data: bytes) -> None:
        """Writes to a log as far as possible: the disk may be full now and have space again later."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[log.write(rest) :]
        except OSError as error:
            if log not in self._incomplete_logs:
                self._incomplete_logs.add(log)
                complain(f"the log {log.name} lacks some of what its worker printed ({error}); the workers go on")
