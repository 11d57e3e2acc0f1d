"""What the workers say: into a log file each, and on to whoever reads along, as it comes.

    worker 1: stdout --> pipe ---+                     +--> worker-1.log   stdout and stderr in one, as they came
                                 +--> Streams (thread) +
    worker 1: stderr --> pipe ---+                     +--> Reader: the terminal, a notebook, nobody

The pipes have names, since a worker need not be a child of this process.
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Stream = Literal["out", "err"]
_CHUNK = 1 << 16


class Reader(ABC):
    """Somebody who reads along."""

    @abstractmethod
    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Takes what a worker has just said; lines may come in pieces. Called in the thread of the streams."""

    @abstractmethod
    def finish(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The two pipes of one worker, by name.

    Args:
        out: for its standard output.
        err: for its standard error.
    """

    out: Path
    err: Path


@dataclass(kw_only=True)
class _Source:
    worker: int
    stream: Stream
    log: BinaryIO | None


class Streams:
    """Reads the pipes of all workers, in a thread of its own. Whoever made it calls ``close`` when they have ended.

    Args:
        folder: where the pipes are made; private to this run.
        logs: the folder of the log files; None keeps none.
        reader: who reads along.
    """

    def __init__(self, folder: Path, *, logs: Path | None, reader: Reader) -> None:
        self._folder, self._logs, self._reader = folder, logs, reader
        self._sources: dict[int, _Source] = {}
        self._files: list[BinaryIO] = []
        self._wake_read, self._wake_write = os.pipe()
        self._changed = threading.Lock()
        self._thread = threading.Thread(target=self._forward, name="lockstep-launch-streams", daemon=True)
        self._thread.start()

    def open(self, worker: int, attempt: int) -> Channel:
        """Makes the pipes of a worker and begins to read them."""
        log = None
        if self._logs is not None:
            log = (self._logs / log_name(worker, attempt)).open("wb", buffering=0)
            self._files.append(log)
        channel = channel_of(self._folder, worker, attempt)
        self._read(channel.out, _Source(worker=worker, stream="out", log=log))
        self._read(channel.err, _Source(worker=worker, stream="err", log=log))
        os.write(self._wake_write, b"+")
        return channel

    def close(self) -> None:
        """Takes what has been said and not read yet, and ends the thread.

        A process that a worker started and left running may hold its pipes open; nobody waits for it.
        """
        os.write(self._wake_write, b"-")
        self._thread.join()
        for handle in (*self._sources, self._wake_read, self._wake_write):
            os.close(handle)
        for file in self._files:
            file.close()

    def _read(self, path: Path, source: _Source) -> None:
        os.mkfifo(path, 0o600)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with self._changed:
            self._sources[handle] = source

    def _forward(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        closing = False
        while not closing:
            ready = {handle for handle, _ in poll.poll()}
            if self._wake_read in ready:
                closing = b"-" in os.read(self._wake_read, _CHUNK)
                self._register(poll)
                ready = set(self._sources) if closing else ready
            # Pipes are opened in the order out, err: what a worker printed before it raised comes before its traceback.
            for handle in sorted(ready & set(self._sources)):
                while self._take(poll, handle) and closing:
                    pass
        self._reader.finish()

    def _register(self, poll: select.poll) -> None:
        with self._changed:
            for handle in self._sources:
                poll.register(handle, select.POLLIN)

    def _take(self, poll: select.poll, handle: int) -> bool:
        """Reads what is there, once; whether there was anything."""
        source = self._sources[handle]
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            poll.unregister(handle)
            return False
        if source.log is not None:
            source.log.write(data)
        self._reader.read(source.worker, source.stream, data)
        return True


def log_name(worker: int, attempt: int) -> str:
    """The log file of a worker: "worker-1.log", and "worker-1.attempt-2.log" after two restarts."""
    return f"worker-{worker}.log" if attempt == 0 else f"worker-{worker}.attempt-{attempt}.log"


def channel_of(folder: Path, worker: int, attempt: int) -> Channel:
    """The pipes of a worker, by name."""
    stem = folder / f"worker-{worker}-{attempt}"
    return Channel(out=stem.with_suffix(".out"), err=stem.with_suffix(".err"))
