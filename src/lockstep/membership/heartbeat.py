"""Heartbeats: every worker writes one to the store again and again, and a worker that falls silent is lost.

    chief          reads all heartbeats, and reports the worker that is silent
    other workers  read the chief's, and report the chief
    all            read the first failure report, and who ended first, beside them

So a beat of N workers costs the store some 3 N short requests and one for N heartbeats, and no worker's cost but the
chief's grows with N.

Two threads: the thread of the ``StoreClient`` talks to the store and may hang with it. The monitor's own thread never
does. It measures how long nothing was heard, so it also finds a chief that was stopped together with its store.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import NamedTuple

from lockstep._torch_compat import Store
from lockstep.errors import ClusterError
from lockstep.membership.failure_report import MESSAGE_LENGTH, FailureReport, JobStatus, describe_loss
from lockstep.membership.store import StoreBrokenError, StoreClient, StoreKeys, StoreSilentError, read_all

# With the default lost_after_s of 15 s: a beat each second, and a silent worker is found after 12 s, or after 4 s once
# a connection has broken.
_BEATS_TO_LOSS, _BEATS_TO_SPREAD, _BEATS_TO_EXPLAIN, _SHORTEST_BEAT_S = 15, 3, 5, 0.1
_QUICK_BEATS, _QUICK_LEAST_S = 4, 1.0
_CLOSE_TIMEOUT_S = 10.0
# The chief waits so long at its end for the others to read of it, since the store goes with it.
_LINGER_BEATS, _LINGER_LEAST_S, _LINGER_POLL_S = 3, 1.0, 0.02

# A place in gloo's source, and its advice to the author of the program.
_GLOO_NOISE = re.compile(r"^\[\S+\] |\. This is typically caused by .*")


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a worker writes to the store again and again while it lives."""

    count: int = -1  # grows with each heartbeat; -1 before the first
    status: str = ""  # what the worker is doing
    ended: bool = False  # it has left the job, or has reported why it ends
    acknowledged: bool = False  # it has read that the chief or the job has ended, so the store may go away
    alarmed: bool = False  # its connection to another worker broke, so the chief is to find a silent one sooner

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Heartbeat:
        """Reads a heartbeat; an empty or unreadable text is a worker without one yet."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls()


@dataclass
class _Peer:
    last: Heartbeat
    heard_s: float


class Peers:
    """The last heartbeats of the workers ``ranks``, and when each came, in seconds on the caller's clock."""

    def __init__(self, ranks: Iterable[int], now_s: float) -> None:
        self._peers = {rank: _Peer(Heartbeat(), heard_s=now_s) for rank in ranks}

    def update(self, heartbeats: Sequence[Heartbeat], now_s: float) -> None:
        """Takes the heartbeats of all of them, as read now. Only a changed count is a sign of life."""
        for peer, heartbeat in zip(self._peers.values(), heartbeats, strict=True):
            if heartbeat.count != peer.last.count:
                peer.heard_s = now_s
            peer.last = heartbeat

    def excuse(self, seconds: float) -> None:
        """Takes a time in which no heartbeat could be read out of every worker's silence."""
        for peer in self._peers.values():
            peer.heard_s += max(0.0, seconds)

    def has_ended(self, rank: int) -> bool:
        """Whether a worker has said that it ends; False for one that is not watched."""
        return rank in self._peers and self._peers[rank].last.ended

    def longest_silent(self, now_s: float, patience_s: float) -> tuple[int, float] | None:
        """The worker that was silent longest, of those that go on, and for how long, if longer than ``patience_s``."""
        # A worker that has said that it ends is not expected to write any more.
        silences = [(now_s - peer.heard_s, rank) for rank, peer in self._peers.items() if not peer.last.ended]
        silence_s, rank = max(silences, default=(0.0, -1))
        return (rank, silence_s) if silence_s > patience_s else None

    def status(self, rank: int) -> str:
        """What a worker was doing at its last heartbeat."""
        return self._peers[rank].last.status

    def any_alarmed(self) -> bool:
        """Whether a connection of one of them broke."""
        return any(peer.last.alarmed for peer in self._peers.values())

    def all_acknowledged(self, but: Collection[int]) -> bool:
        """Whether all, without the ranks in ``but``, have ended or know that this worker or the job has."""
        lasts = [peer.last for rank, peer in self._peers.items() if rank not in but]
        return all(last.ended or last.acknowledged for last in lasts)


class ActiveClock:
    """Seconds in which this process ran: at most ``longest_step_s`` counts between two calls of ``advance``.

    Otherwise a worker that was stopped for a minute and then goes on would take all others for lost.
    """

    def __init__(self, longest_step_s: float) -> None:
        self._longest_step_s = longest_step_s
        self._last = time.monotonic()
        self.now_s = 0.0

    def advance(self) -> None:
        """Counts the time since the last call."""
        now = time.monotonic()
        # test_a_stop_of_the_process_is_not_lived_through: after SIGCONT all others seem to have been silent for as long
        # as this process was stopped.
        self.now_s += min(now - self._last, self._longest_step_s)
        self._last = now


class WorkerEndedError(ClusterError):
    """A worker has ended normally while another still waits for it."""


class _Exchange(NamedTuple):
    """What one exchange with the store read."""

    failure: str
    ended: str  # the first worker that ended normally, as in the store
    heartbeats: tuple[Heartbeat, ...]  # of the watched workers
    acknowledged: bool  # whether it wrote that this worker knows of an end


class HeartbeatMonitor:
    """Sends this worker's heartbeat, and watches all others' as the chief, else the chief's.

    It closes the client of the store in the end.

    ``names`` are the workers' names in messages, in rank order; ``launcher`` is that of the launcher that serves the
    store, None if worker 0 serves it. ``status``, what this worker is doing, goes out with the next heartbeat.
    """

    def __init__(
        self,
        client: StoreClient,
        keys: StoreKeys,
        names: Sequence[str],
        rank: int,
        *,
        lost_after_s: float,
        launcher: str | None = None,
    ) -> None:
        self._client, self._keys, self._names, self._rank = client, keys, tuple(names), rank
        self._lost_after_s = lost_after_s
        self._launcher = launcher
        self._beat_s = max(_SHORTEST_BEAT_S, lost_after_s / _BEATS_TO_LOSS)
        # The finder takes a beat to hear nothing and one to notice, and the others one to read of it: all have ended
        # within lost_after_s.
        self._patience_s = lost_after_s - _BEATS_TO_SPREAD * self._beat_s
        self._quick_s = min(self._patience_s, max(_QUICK_LEAST_S, _QUICK_BEATS * self._beat_s))
        self.job = JobStatus()
        self.status = "the start of the job"
        self._count = 0
        self._ended = self._acknowledged = False
        self._first_ended = ""  # the first worker that ended normally, as in the store
        self._first_ended_s = 0.0  # when this worker read so
        self._chief_ended = False  # and all that matters of it has been read and acknowledged
        self._store_lost = False
        self._alarmed = False  # a connection broke, here or seen from the chief anywhere: silence counts sooner
        self._clock = ActiveClock(2 * self._beat_s)
        # If all workers read all heartbeats, the store would answer N x N values a beat; this way a beat costs it some
        # 3 N short requests, and suite ``control`` measures jobs of up to 1,024 workers.
        self._watched = range(1, len(names)) if rank == 0 else (0,)
        self._peers = Peers(self._watched, 0.0)
        self._exchange: Future[_Exchange] | None = None
        self._exchanges = 0
        self._last_exchange_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Returns while the job goes on.

        Raises ClusterError if a worker is lost, has failed, or has ended while this one still waits for it.
        """
        if (error := self._find_error(self._quick_s)) is not None:
            raise error

    def explain_broken(self, broken: BaseException, other: str, waiting_in: str) -> ClusterError:
        """Why a connection between workers broke. Waits until it is known: a few beats for a worker that was killed."""
        name = self._names[self._rank]
        self._alarmed = True
        # The chief reads of the alarm, and from then on finds a silent worker after ``quick_s``.
        until = time.monotonic() + self._quick_s + _BEATS_TO_EXPLAIN * self._beat_s
        exchanges_before = self._exchanges
        while time.monotonic() < until:
            # A worker that ended wrote so before its connections broke: the next exchange reads it. There is no next
            # exchange if the store went away with that worker.
            is_current = self._exchanges > exchanges_before + 1 or self._chief_ended
            if (error := self._find_error(0.0 if is_current else None, f"; {name} waited in {waiting_in}")) is not None:
                return error
            self.job.wait(self._beat_s)
        reason = (
            f"{name} and {other or 'another worker'} can no longer reach each other although both are alive, so the "
            f"network between them has failed; {name} waited in {waiting_in}: "
            f"{_GLOO_NOISE.sub('', ' '.join(str(broken).split()))[:MESSAGE_LENGTH]}"
        )
        return self.fail(FailureReport(worker=self._rank, reporter=self._rank, reason=reason)).error()

    def read_statuses(self) -> dict[int, str]:
        """What every other worker was doing at its last heartbeat; empty if the store does not answer."""
        ranks = [rank for rank in range(len(self._names)) if rank != self._rank]
        keys = [self._keys.heartbeat(rank) for rank in ranks]
        try:
            texts = self._client.call(lambda store: read_all(store, keys), self._quick_s)
        except (StoreBrokenError, StoreSilentError):
            return {}
        return {rank: Heartbeat.from_json(text).status for rank, text in zip(ranks, texts, strict=True)}

    def fail(self, report: FailureReport) -> FailureReport:
        """Ends the job for all workers, and returns the report that they all raise: this one or an earlier one."""
        return self.job.failure or self.job.fail(self._publish(report, self._lost_after_s), notify=False)

    def close(self) -> None:
        """Tells the others that this worker has ended, and stops. Idempotent."""
        if self._closing.is_set():
            return
        self._ended = True
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        if not (self._chief_ended or self._store_lost):
            self._say_goodbye()
        self._client.close()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._beat()
                self._closing.wait(self._beat_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody would notice a lost worker any more
            reason = f"the heartbeat of {self._names[self._rank]} failed with {type(error).__name__}: {error}"
            report = FailureReport(worker=self._rank, reporter=self._rank, reason=reason)
            self.job.fail(self._publish(report, self._lost_after_s))

    def _beat(self) -> None:
        if self._exchange is None and not (self._chief_ended or self._store_lost):
            self._exchange = self._client.submit(self._exchange_with)
        self._clock.advance()
        # An exchange that the store does not answer stays in flight: a second one would only queue behind it in the
        # client's thread.
        if self._exchange is not None and wait([self._exchange], self._beat_s).done:
            exchange, self._exchange = self._exchange, None
            self._take(exchange)
        self._clock.advance()
        self._find_lost()

    def _exchange_with(self, store: Store) -> _Exchange:
        """Writes this worker's heartbeat and reads what concerns it. Runs in the client's thread."""
        self._count += 1
        heartbeat = Heartbeat(
            count=self._count,
            status=self.status,
            ended=self._ended,
            acknowledged=self._acknowledged,
            alarmed=self._alarmed,
        )
        store.set(self._keys.heartbeat(self._rank), heartbeat.to_json())
        failure, ended, *heartbeats = read_all(
            store, [self._keys.failure, self._keys.ended, *map(self._keys.heartbeat, self._watched)]
        )
        return _Exchange(failure, ended, tuple(map(Heartbeat.from_json, heartbeats)), heartbeat.acknowledged)

    def _take(self, exchange: Future[_Exchange]) -> None:
        try:
            result = exchange.result()
        except StoreBrokenError as error:
            self._lose_store(str(error))
            return
        now_s = self._clock.now_s
        # Nobody could be heard while the store itself did not answer.
        self._peers.excuse(now_s - self._last_exchange_s - 2 * self._beat_s)
        self._peers.update(result.heartbeats, now_s)
        self._last_exchange_s = now_s
        self._exchanges += 1
        if self._rank == 0 and self._peers.any_alarmed():
            self._alarmed = True
        if result.ended and not self._first_ended:  # the time first: another thread may read both at any moment
            self._first_ended_s, self._first_ended = now_s, result.ended
        if result.failure:
            self.job.fail(FailureReport.from_json(result.failure))
        # The chief takes the store with it: what it has written must have been read, and acknowledged, before the
        # connection is lost.
        chief_ended = self._launcher is None and self._peers.has_ended(0)
        self._chief_ended = chief_ended and result.acknowledged
        self._acknowledged = chief_ended or self.job.failure is not None

    def _find_lost(self) -> None:
        if self.job.failure is not None or self._chief_ended:
            return
        now_s = self._clock.now_s
        patience_s = self._quick_s if self._alarmed else self._patience_s
        if (silent_s := now_s - self._last_exchange_s) > patience_s:
            self._lose_store(f"no answer for {silent_s:.1f} s")
        elif (silent := self._peers.longest_silent(now_s, patience_s)) is not None:
            rank, silence_s = silent
            how = f"no heartbeat for {silence_s:.1f} s"
            reason = describe_loss(self._names[rank], how, self._peers.status(rank))
            report = FailureReport(worker=rank, reporter=self._rank, reason=reason)
            self.job.fail(self._publish(report, self._beat_s))

    def _lose_store(self, how: str) -> None:
        """The store is gone, and so is whoever serves it, unless worker 0 serves it and had said that it ends."""
        self._store_lost = True
        if self._launcher is not None:
            reason = (
                f"{self._launcher}, which serves the job's store, is lost: {how}. "
                "It has ended, or the network to it failed; look at its output"
            )
        elif self._peers.has_ended(0):
            self._chief_ended = True
            return
        else:
            name = f"{self._names[0]}, which serves the job's store,"
            reason = describe_loss(name, how, self._peers.status(0) if self._rank else self.status)
        self.job.fail(FailureReport(worker=0, reporter=self._rank, reason=reason))

    def _publish(self, report: FailureReport, timeout_s: float) -> FailureReport:
        try:
            return self._client.call(lambda store: self._keys.write_failure(store, report), timeout_s)
        except (StoreBrokenError, StoreSilentError):
            return report  # the others lose the store too, and raise that

    def _find_error(self, grace_s: float | None, addition: str = "") -> ClusterError | None:
        """What ends this worker, if anything does. A worker that ended counts ``grace_s`` later; None: never."""
        name = self._names[self._rank]
        if (report := self.job.failure) is not None:
            # test_a_worker_that_was_stopped_learns_that_it_was_given_up.
            was_stopped = report.worker == self._rank != report.reporter
            return report.error("; this worker itself was stopped or cut off" if was_stopped else addition)
        if self._closing.is_set():
            return ClusterError(f"{name} has left the job{addition}")
        if not self._first_ended or grace_s is None or self._clock.now_s - self._first_ended_s < grace_s:
            return None
        ended, _, status = self._first_ended.partition(" ")
        last = f" (last status: {status})" if status else ""
        return WorkerEndedError(
            f"{self._names[int(ended)]} has ended while {name} still waits for it{last}{addition}; "
            "every worker must run the same number of steps and make the same calls"
        )

    def _say_goodbye(self) -> None:
        """Tells the others of this worker's end. A worker that serves the store lets them read that first."""
        lingers = self._launcher is None and self._rank == 0
        until = time.monotonic() + (_LINGER_BEATS * self._beat_s + _LINGER_LEAST_S if lingers else self._beat_s)
        pause = threading.Event()
        try:
            ended = f"{self._rank} {self.status}"
            # Not awaited: the calls of one client are made in order, so the exchange below comes after it.
            self._client.submit(lambda store: store.compare_set(self._keys.ended, "", ended))
            while True:
                result = self._client.call(self._exchange_with, until - time.monotonic())
                self._peers.update(result.heartbeats, self._clock.now_s)
                if result.failure:
                    self.job.fail(FailureReport.from_json(result.failure), notify=False)
                # The lost worker will never acknowledge anything.
                excused = self.job.failure.worker if self.job.failure is not None else self._rank
                if not lingers or self._peers.all_acknowledged({excused}) or time.monotonic() > until:
                    return
                pause.wait(_LINGER_POLL_S)
        except (StoreBrokenError, StoreSilentError):
            return  # nobody is left to tell
