"""Who reads along with the workers: the chief's output as it is, or all of it with each line's worker before it."""

from __future__ import annotations

import codecs
import sys
from typing import Literal

from lockstep.launch.streams import Reader, Stream


class NobodyReader(Reader):
    """Nobody: the log files have it."""

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Drops it."""

    def finish(self) -> None:
        """Nothing was kept."""


class ChiefReader(Reader):
    """Passes on what the chief says to this process's own streams, piece by piece: progress bars stay what they are."""

    def __init__(self) -> None:
        self._to = {"out": sys.stdout, "err": sys.stderr}
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"out": make("replace"), "err": make("replace")}  # a character may come in two pieces

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Writes it, if the chief said it."""
        if worker == 0:
            self._to[stream].write(self._decoders[stream].decode(data))
            self._to[stream].flush()

    def finish(self) -> None:
        """All has been written."""


class EveryReader(Reader):
    """Passes on whole lines of all workers, each after its worker's number; of a progress bar, where it came to."""

    def __init__(self) -> None:
        self._to = {"out": sys.stdout, "err": sys.stderr}
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
        self._to[stream].write(f"[{worker}] {shown}\n")
        self._to[stream].flush()


def reader_for(output: Literal["chief", "all", "none"]) -> Reader:
    """The one whom ``--output`` names."""
    readers: dict[str, type[Reader]] = {"chief": ChiefReader, "all": EveryReader, "none": NobodyReader}
    return readers[output]()
