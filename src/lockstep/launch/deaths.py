"""When the workers of a host ended, in the order in which they did: the kernel tells, within a millisecond."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping


class Deaths:
    """Watches processes until they have ended, in a thread of its own. Whoever made it calls ``close``.

    Args:
        pids: the processes, by their local number.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._ended_ns: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        for local, pid in pids.items():
            self._open(local, pid)
        self._thread = threading.Thread(target=self._watch, name="lockstep-launch-deaths", daemon=True)
        self._thread.start()

    @property
    def ended_ns(self) -> dict[int, int]:
        """When each that has ended did, by ``time.monotonic_ns``, to this moment."""
        return dict(self._ended_ns)

    def close(self) -> None:
        """Ends the thread."""
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)
        for handle in self._handles:
            os.close(handle)

    def _open(self, local: int, pid: int) -> None:
        try:
            self._handles[os.pidfd_open(pid)] = local
        except ProcessLookupError:
            self._ended_ns[local] = time.monotonic_ns()

    def _watch(self) -> None:
        poll = select.poll()
        for each in (*self._handles, self._wake_read):
            poll.register(each, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._wake_read:
                    return
                self._ended_ns[self._handles[ready]] = time.monotonic_ns()
                poll.unregister(ready)
