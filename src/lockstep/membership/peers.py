"""What one worker knows of all: their last words and when they came. Pure but for its clock."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lockstep.membership.status import Status


@dataclass
class _Peer:
    """Times are in seconds by the watch's clock."""

    status: Status
    heard_s: float
    ended_s: float | None = None
    signs_of_life: int = 0


class Peers:
    """The workers of a job, as one of them hears of them.

    Args:
        count: how many there are.
        own: the number of the one that listens; it is never silent to itself.
        now_s: when it began to listen.
    """

    def __init__(self, count: int, own: int, now_s: float) -> None:
        self._own = own
        self._peers = [_Peer(Status(beat=-1), heard_s=now_s) for _ in range(count)]

    def hear(self, statuses: Sequence[Status], now_s: float) -> None:
        """Takes in every worker's status; a beat that is not the one known is a sign of life."""
        for peer, status in zip(self._peers, statuses, strict=True):
            if status.beat != peer.status.beat:
                peer.heard_s = now_s
                peer.signs_of_life += 1
            if status.ended and peer.ended_s is None:
                peer.ended_s = now_s
            peer.status = status

    def excuse(self, seconds: float) -> None:
        """Leaves out of everybody's silence a time in which nobody could be heard."""
        for peer in self._peers:
            peer.heard_s += max(0.0, seconds)

    def has_ended(self, index: int) -> bool:
        """Whether this worker has said that it ends."""
        return self._peers[index].ended_s is not None

    def all_silent(self, now_s: float, patience_s: float) -> dict[int, float]:
        """The workers that have been silent for more than ``patience_s`` without having ended, and for how long."""
        return {
            index: now_s - peer.heard_s
            for index, peer in enumerate(self._peers)
            if index != self._own and peer.ended_s is None and now_s - peer.heard_s > patience_s
        }

    def find_silent(self, now_s: float, patience_s: float) -> int | None:
        """The one of them that has been silent longest."""
        silent = self.all_silent(now_s, patience_s)
        return max(silent, key=lambda index: silent[index], default=None)

    def silence(self, index: int, now_s: float) -> tuple[float, str]:
        """For how many seconds nothing was heard of a worker, and what it was doing then."""
        return now_s - self._peers[index].heard_s, self._peers[index].status.doing

    def signs_of_life(self, index: int) -> int:
        """How many beats of a worker were heard. The first may be an old one, which only now was read."""
        return self._peers[index].signs_of_life

    def find_left(self, now_s: float, grace_s: float) -> int | None:
        """The first worker that ended at least ``grace_s`` seconds ago."""
        left = [
            (peer.ended_s, index)
            for index, peer in enumerate(self._peers)
            if index != self._own and peer.ended_s is not None and now_s - peer.ended_s >= grace_s
        ]
        return min(left)[1] if left else None

    def know_of_the_end(self, but: Collection[int]) -> bool:
        """Whether all others have ended, or have read that this one or the job has; leaves out the workers ``but``."""
        return all(
            peer.status.ended or peer.status.warned
            for index, peer in enumerate(self._peers)
            if index != self._own and index not in but
        )


class LivedClock:
    """Seconds that this process has lived through: a stop of its own, or of its machine, does not count.

    Else a worker that was stopped for a minute and goes on would take all the others for lost.

    Args:
        longest_step_s: what counts at most between two calls of ``advance``.
    """

    def __init__(self, longest_step_s: float) -> None:
        self._longest_step_s = longest_step_s
        self._last = time.monotonic()
        self.now_s = 0.0

    def advance(self) -> None:
        """Counts the time since the last call."""
        now = time.monotonic()
        self.now_s += min(now - self._last, self._longest_step_s)
        self._last = now
