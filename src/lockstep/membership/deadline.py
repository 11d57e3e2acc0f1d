"""How long a worker waits for the others at the start, and what it says meanwhile."""

from __future__ import annotations

import logging
import time

from lockstep.errors import ClusterError

_FIRST_REPORT_S = 2.0
_REPORT_EVERY_S = 5.0
_LEAST_LEFT_S = 0.2

_log = logging.getLogger("lockstep")


class Deadline:
    """The end of a wait, of which every few seconds somebody is told through the logger "lockstep".

    Args:
        who: who waits: "worker 1 (hostb:20001)".
        timeout_s: how long.
    """

    def __init__(self, who: str, timeout_s: float) -> None:
        self._who = who
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._next_report = time.monotonic() + _FIRST_REPORT_S

    @property
    def left_s(self) -> float:
        """How long a single call may still take: a little, even when the time is over."""
        return max(_LEAST_LEFT_S, self._end - time.monotonic())

    def wait_for(self, what: str, advice: str) -> None:
        """Notes that ``what`` is still missing; says so when it is time to.

        Raises:
            ClusterError: the time is over; it ends with ``advice``.
        """
        now = time.monotonic()
        if now >= self._end:
            raise ClusterError(f"{self._who} waited {self._timeout_s:g} s for {what}; {advice}")
        if now >= self._next_report:
            self._next_report = now + _REPORT_EVERY_S
            _log.warning("%s waits for %s; %.0f s left", self._who, what, self._end - now)
