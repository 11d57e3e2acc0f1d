"""What the workers say: into a log file each, and on to whoever reads along, as it comes.

worker 1: stdout --> pipe ---+                     +--> worker-1.log   stdout and stderr in one, as they came
                             +--> Streams (thread) +
worker 1: stderr --> pipe ---+                     +--> Reader: the terminal, a notebook, nobody
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from lockstep.launch.places import log_path, pipe_path
from lockstep.launch.telling import Tell

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
