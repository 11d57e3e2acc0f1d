"""Who is still there: every worker writes a beat into the store and reads the others'; silence is a loss.

Two threads. One talks to the store (``Line``) and may hang with it; the other, here, never does: it counts how long
nothing was heard, so that a chief that was stopped with its store is found out like anybody else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from lockstep.errors import ClusterError
from lockstep.membership.failure_report import (
    Ending,
    JobEnd,
    describe_broken_link,
    describe_early_end,
    describe_loss,
    describe_lost_launcher,
    describe_lost_store,
    read_ending,
)
from lockstep.membership.store import Line, Place, StoreBrokenError, StoreSilentError, read


@dataclass(frozen=True, kw_only=True)
class Status:
    """A worker's last word.

    Args:
        beat: grows with each; a beat that stays the same is silence.
        doing: what the worker was doing.
        ended: it has left the job in good order, or has said why it ends.
        warned: it has read that the chief or the job ends, so that the store may go.
    """

    beat: int
    doing: str = ""
    ended: bool = False
    warned: bool = False

    def to_text(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self))


def read_status(text: str) -> Status:
    """A status as it was kept in the store; an empty or unreadable one is a worker that has not spoken yet."""
    try:
        return Status(**json.loads(text))
    except (ValueError, TypeError):
        return Status(beat=-1)


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


_BEATS_TO_LOSS = 15
_BEATS_TO_SPREAD = 3
_SHORTEST_BEAT_S = 0.1
_QUICK_BEATS = 4
_QUICK_LEAST_S = 1.0

_END_LIMIT_S = 10.0
_LINGER_BEATS = 3
_LINGER_LEAST_S = 1.0
_LINGER_TURN_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round brought.

    Args:
        ending: why the job ends; empty while it goes on.
        statuses: every worker's, in worker order.
        warned: this worker has told the others that it has read of an end.
    """

    ending: str
    statuses: tuple[str, ...]
    warned: bool


class WorkerEndedError(ClusterError):
    """A worker has ended in good order while another still waits for it."""


class Watch:
    """One worker's watch over all others.

    Args:
        line: the connection to the store.
        place: where the run lies in it.
        names: how messages call the workers, in worker order.
        index: this worker's number.
        lost_after_s: how long a worker may be silent.
        launcher: how messages call who serves the store; None where worker 0 does.

    Attributes:
        end: the job's end, once it is known.
        doing: what this worker does; goes out with the next beat.
    """

    def __init__(
        self,
        line: Line,
        place: Place,
        names: Sequence[str],
        index: int,
        *,
        lost_after_s: float,
        launcher: str | None = None,
    ) -> None:
        self._line = line
        self._place = place
        self._names = tuple(names)
        self._index = index
        self._lost_after_s = lost_after_s
        self._launcher = launcher
        self._beat_s = max(_SHORTEST_BEAT_S, lost_after_s / _BEATS_TO_LOSS)
        # The finder needs a beat to notice, and the others one to read of it: all have ended within lost_after_s.
        self._patience_s = lost_after_s - _BEATS_TO_SPREAD * self._beat_s
        self._quick_s = min(self._patience_s, max(_QUICK_LEAST_S, _QUICK_BEATS * self._beat_s))
        self.end = JobEnd()
        self.doing = "the start of the job"
        self._beat = 0
        self._ended = self._warned = self._over = self._gone = self._alarmed = False
        self._clock = LivedClock(2 * self._beat_s)
        self._peers = Peers(len(names), index, 0.0)
        self._round: Future[Round] | None = None
        self._rounds = 0
        self._last_round_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Returns while the job goes on.

        Raises:
            ClusterError: a worker is lost, has failed, or has ended while this one still waits for it.
        """
        if (error := self._find_error(self._quick_s)) is not None:
            raise error

    def explain(self, broken: BaseException, other: str, waiting_in: str) -> ClusterError:
        """Why a connection between workers broke; waits until it is known, a few beats for a worker that was killed."""
        here = f"; {self._names[self._index]} waited in {waiting_in}"
        self._alarmed = True
        # Being alarmed, this worker would have found a silent one after ``quick_s``.
        limit = time.monotonic() + self._quick_s + _BEATS_TO_SPREAD * self._beat_s
        seen = self._rounds
        while time.monotonic() < limit:
            # What a worker that ended had to say came before its connections broke: the next round brings it.
            # None comes where the store went with it.
            known = self._rounds > seen + 1 or self._over
            if (error := self._find_error(0.0 if known else None, here)) is not None:
                return error
            self.end.wait(self._beat_s)
        own = self._index
        reason = describe_broken_link(self._names[own], other, waiting_in, str(broken))
        return self.end_job(Ending(worker=own, found_by=own, reason=reason)).error()

    def elsewhere(self) -> dict[int, str]:
        """What the others were doing when last heard of, where it is not what this one does."""
        doings = {index: self._peers.silence(index, self._clock.now_s)[1] for index in range(len(self._names))}
        return {index: doing for index, doing in doings.items() if index != self._index and doing != self.doing}

    def end_job(self, ending: Ending) -> Ending:
        """Ends the job for all workers with this cause, or the one that was there first; returns that one."""
        return self.end.ending or self.end.conclude(self._publish(ending, self._lost_after_s), tell=False)

    def close(self) -> None:
        """Tells the others that this worker has ended, and stops watching. Idempotent."""
        if self._closing.is_set():
            return
        self._ended = True
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_LIMIT_S)
        if not (self._over or self._gone):
            self._say_goodbye()
        self._line.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()
            self._closing.wait(self._beat_s)

    def _turn(self) -> None:
        if self._round is None and not (self._over or self._gone):
            self._round = self._line.submit(self._exchange)
        self._clock.advance()
        if self._round is not None and wait([self._round], self._beat_s).done:
            done, self._round = self._round, None
            self._take_in(done)
        self._clock.advance()
        self._judge()
        self.end.wake()

    def _exchange(self, store: Store) -> Round:
        """Writes this worker's status and reads all; runs in the line's thread."""
        self._beat += 1
        status = Status(beat=self._beat, doing=self.doing, ended=self._ended, warned=self._warned)
        store.set(self._place.beat(self._index), status.to_text())
        ending = read(store, self._place.ending)
        statuses = store.multi_get([self._place.beat(index) for index in range(len(self._names))])
        return Round(ending=ending, statuses=tuple(status.decode() for status in statuses), warned=status.warned)

    def _take_in(self, done: Future[Round]) -> None:
        try:
            heard = done.result()
        except StoreBrokenError as error:
            self._lose_store(str(error))
            return
        now_s = self._clock.now_s
        # Nobody could be heard of while the store itself did not answer.
        self._peers.excuse(now_s - self._last_round_s - 2 * self._beat_s)
        self._peers.hear([read_status(text) for text in heard.statuses], now_s)
        self._last_round_s = now_s
        self._rounds += 1
        if heard.ending:
            self.end.conclude(read_ending(heard.ending))
        chief_ended = self._launcher is None and self._index != 0 and self._peers.has_ended(0)
        self._over = chief_ended and heard.warned
        self._warned = chief_ended or self.end.ending is not None

    def _judge(self) -> None:
        if self.end.ending is not None or self._over:
            return
        now_s = self._clock.now_s
        silent_s = now_s - self._last_round_s
        patience_s = self._quick_s if self._alarmed else self._patience_s
        if silent_s > patience_s:
            self._lose_store(f"no answer for {silent_s:.1f} s")
            return
        lost = self._peers.find_silent(now_s, patience_s)
        if lost is not None:
            silent_s, doing = self._peers.silence(lost, now_s)
            ending = Ending(worker=lost, found_by=self._index, reason=describe_loss(self._names[lost], silent_s, doing))
            self.end.conclude(self._publish(ending, self._beat_s))

    def _lose_store(self, how: str) -> None:
        """The store is gone, and with it whoever serves it, unless that one had said that it ends."""
        if self._launcher is None and self._peers.has_ended(0):
            self._over = True
        elif self.end.ending is None:
            _, doing = self._peers.silence(0, self._clock.now_s)
            if self._launcher is None:
                reason = describe_lost_store(self._names[0], how, doing)
            else:
                reason = describe_lost_launcher(self._launcher, how)
            self.end.conclude(Ending(worker=0, found_by=self._index, reason=reason))
        self._gone = True

    def _publish(self, ending: Ending, limit_s: float) -> Ending:
        try:
            return self._line.call(lambda store: self._place.end(store, ending), limit_s)
        except (StoreBrokenError, StoreSilentError):
            return ending  # the others lose the store as well, and say so

    def _find_error(self, grace_s: float | None, addition: str = "") -> ClusterError | None:
        """What ends this worker, if anything does; one that has ended counts after ``grace_s``, never if None."""
        if (ending := self.end.ending) is not None:
            given_up = ending.worker == self._index != ending.found_by
            return ending.error("; this worker was stopped or cut off itself" if given_up else addition)
        if self._closing.is_set():
            return ClusterError(f"{self._names[self._index]} has left the job{addition}")
        left = None if grace_s is None else self._peers.find_left(self._clock.now_s, grace_s)
        if left is None:
            return None
        _, doing = self._peers.silence(left, self._clock.now_s)
        return WorkerEndedError(describe_early_end(self._names[left], self._names[self._index], doing, addition))

    def _say_goodbye(self) -> None:
        """Tells the others of this worker's end; one that serves the store lets them read that before it goes."""
        lingers = self._launcher is None and self._index == 0
        limit = time.monotonic() + (_LINGER_BEATS * self._beat_s + _LINGER_LEAST_S if lingers else self._beat_s)
        pause = threading.Event()
        try:
            while True:
                heard = self._line.call(self._exchange, limit - time.monotonic())
                self._peers.hear([read_status(text) for text in heard.statuses], self._clock.now_s)
                lost = self.end.ending.worker if self.end.ending is not None else self._index
                if not lingers or self._peers.know_of_the_end({lost}) or time.monotonic() > limit:
                    return
                pause.wait(_LINGER_TURN_S)
        except (StoreBrokenError, StoreSilentError):
            return  # nobody left to tell
