"""Who reads along with the workers: the chief's output as it is, or all of it with each line's worker before it."""

from __future__ import annotations

import codecs
import sys
from contextlib import suppress
from typing import Literal, TextIO

from lockstep.launch.streams import Reader, Stream

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
