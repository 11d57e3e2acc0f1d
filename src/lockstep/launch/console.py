"""Who reads along with the workers: the chief's output as it is, or all of it with each line's worker before it."""

from __future__ import annotations

import sys

from lockstep.launch.streams import Reader, Stream


class ChiefReader(Reader):
    """Passes on what the chief says to this process's own streams, piece by piece: progress bars stay what they are."""

    def __init__(self) -> None:
        self._to = {"out": sys.stdout, "err": sys.stderr}

    def read(self, worker: int, stream: Stream, data: bytes) -> None:
        """Writes it, if the chief said it."""
        if worker == 0:
            self._to[stream].write(data.decode(errors="replace"))
            self._to[stream].flush()

    def finish(self) -> None:
        """All has been written."""
