"""Who reads along with the workers: the chief's output as it is, or all of it with each line's worker before it."""

from __future__ import annotations

import codecs
import os
import select
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from lockstep.launch.run_paths import log_path, pipe_path

Tell = Callable[[str], None]
"""Takes one line."""


def tell_nobody(line: str) -> None:
    """For who does not want to know."""


Stream = Literal["out", "err"]
STREAMS: tuple[Stream, Stream] = ("out", "err")
_CHUNK = 1 << 16


class Reader(ABC):
    """Somebody who reads along. No method may raise: the workers would wait for a thread that has stopped to read."""

    @abstractmethod
    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Takes what a worker has just said; lines may come in pieces. Called in the thread of the streams."""

    @abstractmethod
    def finish(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The two pipes of one worker, as paths to open for writing.

    Args:
        out: for its standard output.
        err: for its standard error.
    """

    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class _Source:
    worker: int
    stream: Stream
    log: BinaryIO | None


class Streams:
    """Reads the pipes of all workers, in a thread of its own. Whoever made it calls ``close`` when they have ended.

    Args:
        folder: for pipes that need a name.
        logs: the folder of the log files; None keeps none.
        reader: who reads along.
        complain: takes a line about a log that cannot be written, once for each. Called in the thread.
    """

    def __init__(self, folder: Path, *, logs: Path | None, reader: Reader, complain: Tell) -> None:
        self._folder, self._logs, self._reader, self._complain = folder, logs, reader, complain
        self._complained: set[BinaryIO] = set()
        self._sources: dict[int, _Source] = {}  # by reading end
        self._held: list[int] = []  # writing ends, so that a pipe is never at its end while it is read
        self._files: list[BinaryIO] = []
        self._wake_read, self._wake_write = os.pipe()
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._forward, name="lockstep-launch-streams", daemon=True)
        self._thread.start()

    def open(self, worker: int, attempt: int, *, named: bool) -> Channel:
        """Makes the pipes of a worker and begins to read them.

        Args:
            worker: its number among the workers of all hosts.
            attempt: how often it was started again.
            named: it opens them by itself; else this process does, and hands them over.
        """
        log = None
        if self._logs is not None:
            log = log_path(self._logs, worker, attempt).open("ab", buffering=0)
            self._files.append(log)
        paths: dict[Stream, str] = {}
        for stream in STREAMS:
            reading, writing, paths[stream] = self._pipe(worker, attempt, stream, named=named)
            os.set_blocking(reading, False)
            with self._changing:
                self._held.append(writing)
                self._sources[reading] = _Source(worker=worker, stream=stream, log=log)
        os.write(self._wake_write, b"+")
        return Channel(out=paths["out"], err=paths["err"])

    def close(self) -> None:
        """Takes what has been said and not read yet, and ends the thread.

        A process that a worker started and left running may hold its pipes open; nobody waits for it.
        """
        os.write(self._wake_write, b"-")
        self._thread.join()
        for handle in (*self._sources, *self._held, self._wake_read, self._wake_write):
            os.close(handle)
        for file in self._files:
            file.close()

    def _pipe(self, worker: int, attempt: int, stream: Stream, *, named: bool) -> tuple[int, int, str]:
        if not named:
            reading, writing = os.pipe()
            return reading, writing, f"/dev/fd/{writing}"
        path = pipe_path(self._folder, worker, attempt, stream)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        return reading, os.open(path, os.O_WRONLY), str(path)

    def _forward(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {handle for handle, _ in poll.poll()}
            if self._wake_read in ready:
                closing = b"-" in os.read(self._wake_read, _CHUNK)
                with self._changing:
                    known = list(self._sources)
                if closing:
                    break
                for handle in known:
                    poll.register(handle, select.POLLIN)
            # In the order out, err: what a worker printed before it raised comes before its traceback.
            for handle in sorted(ready - {self._wake_read}):
                self._take(handle)
        for handle in known:
            while self._take(handle):
                pass
        self._reader.finish()

    def _take(self, handle: int) -> bool:
        """Reads what is there, once; whether there was anything."""
        source = self._sources[handle]
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        if source.log is not None:
            self._keep(source.log, data)
        self._reader.read(source.worker, source.stream, data)
        return True

    def _keep(self, log: BinaryIO, data: bytes) -> None:
        """Writes to a log, as far as that is possible: the disk may be full, and have space again later."""
        left = memoryview(data)
        try:
            while left:
                left = left[log.write(left) :]
        except OSError as error:
            if log not in self._complained:
                self._complained.add(log)
                self._complain(f"the log {log.name} lacks some of what its worker printed ({error}); the workers go on")


_NAMES: dict[Stream, str] = {"out": "standard output", "err": "standard error"}


def complain(line: str) -> None:
    """Says on standard error what went wrong beside the workers; where that is gone too, nobody is left to hear it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"lockstep: {line}\n")
            sys.stderr.flush()


class _Terminal:
    """This process's standard output and error. Whatever they are, and however they break, ``write`` never raises.

    The workers would wait for ever for a thread that has ended to read their pipes. After a first failure nothing more
    is written to a stream, and it has been said why.
    """

    def __init__(self) -> None:
        self._to: dict[Stream, TextIO | None] = {"out": sys.stdout, "err": sys.stderr}
        self._lost: set[Stream] = set()

    def write(self, stream: Stream, text: str) -> None:
        if stream in self._lost or not text:
            return
        try:
            _write(self._to[stream], text)
        except Exception as error:  # noqa: BLE001 - a notebook's or a user's stream may raise anything
            self._lost.add(stream)
            why = f"{type(error).__name__}: {error}"
            complain(
                f"the workers' {_NAMES[stream]} can no longer be passed on ({why}); they go on, and their logs, where"
                " they keep any, have all of it"
            )


def _write(to: TextIO | None, text: str) -> None:
    """Writes and flushes; a character that the stream's encoding lacks is written as Python escapes it."""
    if to is None:
        raise ValueError("this process has none")
    try:
        to.write(text)
    except UnicodeEncodeError as error:
        to.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    to.flush()


class NobodyReader(Reader):
    """Nobody: the log files have it."""

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Drops it."""

    def finish(self) -> None:
        """Nothing was kept."""


class ChiefReader(Reader):
    """Passes on what the chief says to this process's own streams, piece by piece: progress bars stay what they are."""

    def __init__(self) -> None:
        self._terminal = _Terminal()
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"out": make("replace"), "err": make("replace")}  # a character may come in two pieces

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Writes it, if the chief said it."""
        if worker == 0:
            self._terminal.write(stream, self._decoders[stream].decode(data))

    def finish(self) -> None:
        """All has been written."""


class EveryReader(Reader):
    """Passes on whole lines of all workers, each after its worker's number; of a progress bar, where it came to."""

    def __init__(self) -> None:
        self._terminal = _Terminal()
        self._begun: dict[tuple[int, Stream], bytes] = {}

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Writes the lines that are complete."""
        *lines, rest = (self._begun.pop((worker, stream), b"") + data).split(b"\n")
        for line in lines:
            self._write(worker, stream, line)
        if rest:
            self._begun[worker, stream] = rest

    def finish(self) -> None:
        """Writes the lines that were never ended."""
        for (worker, stream), line in self._begun.items():
            self._write(worker, stream, line)

    def _write(self, worker: int, stream: Stream, line: bytes) -> None:
        shown = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self._terminal.write(stream, f"[{worker}] {shown}\n")


def reader_for(output: Literal["chief", "all", "none"]) -> Reader:
    """The one whom ``--output`` names."""
    readers: dict[str, type[Reader]] = {"chief": ChiefReader, "all": EveryReader, "none": NobodyReader}
    return readers[output]()
