"""Writing in a thread: one piece of work at a time, which ends by itself, and whose error waits to be asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Does one write at a time in a thread of its own.

    The thread is no daemon: it lives as long as one write takes, and the interpreter waits for it at its end, so that
    a checkpoint that was begun is finished.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins ``work``; what was begun before must be finished."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="lockstep-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Waits for what was begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Waits for what was begun.

        Raises:
            BaseException: what it ended with, once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - not swallowed: finish hands it on
            self._error = error
