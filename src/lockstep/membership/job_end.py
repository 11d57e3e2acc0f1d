"""The end of a job as one worker knows it: set once, and told to whoever waits for it in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lockstep.errors import ClusterError
from lockstep.membership.ending import Ending

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
