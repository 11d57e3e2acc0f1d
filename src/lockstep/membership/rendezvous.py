"""The roll call: every worker takes its seat in the store, and nobody goes on before all are there and agree.

Seats are taken by compare-and-set, so the first process of a number has it, as long as it lives: a seat whose process
has gone silent is taken over by the next one, until worker 0 finds every seat taken and completes the call.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep.membership.failure_report import Ending, describe_failure, read_ending
from lockstep.membership.heartbeat import Peers, Status, read_status
from lockstep.membership.store import REFUSED_KEY, Line, Place, StoreBrokenError, StoreSilentError, read, run_key

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


SILENT_S = 3.0
"""After how long without a sign of life a process counts as gone, as far as its place is concerned."""

PROTOCOL = 1
"""Of what the workers exchange; raised when workers of two versions of lockstep could not understand each other."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A worker at the roll call.

    Args:
        index: its number.
        host: the name of its machine.
        pid: its process, there.
        address: the IP address that it listens at for the others.
        token: tells this process from any other that claims the same number.
        info: what it has to tell the others at the start.
        terms: what must be equal on all workers, by name.
    """

    index: int
    host: str
    pid: int
    address: str
    token: str
    info: Mapping[str, int]
    terms: Mapping[str, str]

    def to_text(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def process(self) -> str:
        """Which process this is: "process 4242 on hostb"."""
        return f"process {self.pid} on {self.host}"


def this_process() -> str:
    """How messages call the process that runs this: "process 4242 on hostb"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def read_card(text: str) -> Card:
    """A card as it was kept in the store.

    Raises:
        ClusterError: it is none.
    """
    try:
        return Card(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ClusterError(
            f"what lies in the job's store is no worker's entry ({error}); start all workers with the same lockstep"
        ) from None


def terms_of(spec: ClusterSpec, lost_after_s: float) -> dict[str, str]:
    """What this worker expects to find equal on the others, the most telling first."""
    return {
        "protocol": str(PROTOCOL),
        "lockstep": _own_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "number of workers": str(spec.num_workers),
        "workers": ", ".join(spec.workers),
        "lost_after_s": f"{lost_after_s:g}",
    }


def there_already(spec: ClusterSpec, card: str) -> ClusterError:
    """The error for a process whose place another one has, which left ``card`` there."""
    return ClusterError(
        f"{spec.name(spec.index)} is there already: {read_card(card).process}; this is {this_process()}. "
        "Give every process an index of its own, or end that one first"
    )


def find_disagreement(mine: Card, theirs: Card, names: tuple[str, str]) -> str:
    """What two workers disagree about, in one line; empty if nothing. ``names`` are how messages call them."""
    for term in [*mine.terms, *(term for term in theirs.terms if term not in mine.terms)]:
        here, there = mine.terms.get(term, "unknown"), theirs.terms.get(term, "unknown")
        if here != there:
            return (
                f"{names[1]} and {names[0]} disagree: {term} is {there} on {names[1]} and {here} on {names[0]}; "
                "start all workers with the same cluster, settings and versions"
            )
    return ""


def _own_version() -> str:
    try:
        return version("torch-lockstep")
    except PackageNotFoundError:  # run from its source, without being installed
        return "not installed"


T = TypeVar("T")

_SHORTEST_TURN_S, _LONGEST_TURN_S = 0.02, 0.25
_ANSWER_S = 1.0
_LINGER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _View:
    """The roll call as the store shows it, in worker order."""

    run: str
    seats: tuple[str, ...]
    statuses: tuple[Status, ...]
    complete: str
    ending: str
    refused: str


class RollCall:
    """One worker's part in the roll call of one run.

    Args:
        spec: the cluster, and this worker's number.
        card: what this worker says of itself.
        line: the connection to the store.
        place: where the run lies in it.
        run: the run's name.
        deadline: until when to wait.
    """

    def __init__(self, spec: ClusterSpec, card: Card, line: Line, place: Place, run: str, deadline: Deadline) -> None:
        self._spec = spec
        self._card = card
        self._text = card.to_text()
        self._line = line
        self._place = place
        self._run = run
        self._deadline = deadline
        self._seated = False
        self._full: tuple[tuple[str, ...], list[int]] | None = None
        self._beat = 0
        self._peers = Peers(spec.num_workers, spec.index, time.monotonic())

    def answer(self) -> tuple[Card, ...]:
        """Waits until all workers are there and agree; their cards in worker order.

        Raises:
            ClusterError: somebody is missing at the deadline, disagrees, or has this worker's number already.
            StoreBrokenError: the store is gone, or worker 0 has opened a newer run: come in again.
        """
        pause, turn_s = threading.Event(), _SHORTEST_TURN_S
        while True:
            view = self._ask(self._look)
            self._peers.hear(view.statuses, time.monotonic())
            if cards := self._heed(view):
                return cards
            pause.wait(turn_s)
            turn_s = min(1.2 * turn_s, _LONGEST_TURN_S)

    def give_up(self, error: BaseException) -> None:
        """Leaves the roll call: worker 0 ends it for all, any other frees its seat for a process that comes later."""
        try:
            if self._spec.index == 0:
                reason = str(error)
                if not isinstance(error, ClusterError):
                    reason = describe_failure(self._spec.name(0), error, "the roll call")
                self._line.call(
                    lambda store: self._place.end(store, Ending(worker=0, found_by=0, reason=reason)), _ANSWER_S
                )
                self._linger()
            else:
                self._line.call(lambda store: store.compare_set(self._seat, self._text, ""), _ANSWER_S)
        except (StoreBrokenError, StoreSilentError):
            return  # nobody left to tell

    @property
    def _seat(self) -> str:
        return self._place.seat(self._spec.index)

    def _look(self, store: Store) -> _View:
        """One turn: takes or keeps the seat, gives a sign of life, reads everything. Runs in the line's thread."""
        ending, complete = read(store, self._place.ending), read(store, self._place.complete)
        if not (self._seated or ending or complete):
            self._seated = store.compare_set(self._seat, "", self._text).decode() == self._text
        if self._seated:
            self._beat += 1
            status = Status(beat=self._beat, doing="the roll call", warned=bool(ending))
            store.set(self._place.beat(self._spec.index), status.to_text())
        everybody = range(self._spec.num_workers)
        return _View(
            run=read(store, run_key(self._spec)),
            seats=tuple(read(store, self._place.seat(index)) for index in everybody),
            statuses=tuple(read_status(read(store, self._place.beat(index))) for index in everybody),
            complete=complete,
            ending=ending,
            refused=read(store, REFUSED_KEY),
        )

    def _heed(self, view: _View) -> tuple[Card, ...] | None:
        if view.run != self._run:
            raise StoreBrokenError("worker 0 has opened the job anew")
        if not self._seated:
            self._wait_for_seat(view)
            return None
        if view.ending:
            raise read_ending(view.ending).error()
        if view.complete:
            return self._read_complete(view.complete)
        cards = {index: read_card(text) for index, text in enumerate(view.seats) if text}
        self._compare(cards)
        silent = self._peers.all_silent(time.monotonic(), SILENT_S)
        missing = [index for index in range(self._spec.num_workers) if index not in cards or index in silent]
        if not missing and self._spec.index == 0 and self._all_alive(view.seats):
            self._ask(lambda store: store.set(self._place.complete, json.dumps(view.seats)))
            return tuple(cards[index] for index in range(self._spec.num_workers))
        self._wait(missing, view.refused)
        return None

    def _all_alive(self, seats: tuple[str, ...]) -> bool:
        """Whether all have given a sign of life since the last one took its seat: one that came early may have died."""
        signs = [self._peers.signs_of_life(index) for index in range(self._spec.num_workers)]
        if self._full is None or self._full[0] != seats:
            self._full = (seats, signs)
        return all(now > then for now, then in zip(signs, self._full[1], strict=True))

    def _read_complete(self, complete: str) -> tuple[Card, ...]:
        cards = tuple(read_card(text) for text in json.loads(complete))
        own = cards[self._spec.index]
        if own.token != self._card.token:  # another one took the seat over, this process having been silent
            raise there_already(self._spec, own.to_text())
        return cards

    def _wait_for_seat(self, view: _View) -> None:
        """The seat is another process's, or the run has begun or ended: waits for the seat, or for the next run.

        Raises:
            ClusterError: the process that has the seat is alive, or the deadline is over.
        """
        name, text = self._spec.name(self._spec.index), view.seats[self._spec.index]
        own, now = self._spec.index, time.monotonic()
        if view.ending or not text or self._peers.has_ended(own):
            self._deadline.wait_for("an earlier run of this job to end", "end its processes, or look at what they do")
            return
        if self._peers.signs_of_life(own) > 1:
            raise there_already(self._spec, text)
        if view.complete or self._peers.silence(own, now)[0] <= SILENT_S:
            self._deadline.wait_for(
                f"the end of the run that was {name} before, {read_card(text).process}",
                "end all workers and start them again",
            )
        else:
            self._seated = (
                self._ask(lambda store: store.compare_set(self._seat, text, self._text)) == self._text.encode()
            )

    def _compare(self, cards: dict[int, Card]) -> None:
        """Raises, on all workers, what this one and another disagree about."""
        for index, card in cards.items():
            names = (self._spec.name(self._spec.index), f"worker {index} ({card.process})")
            found = find_disagreement(self._card, card, names) or _find_unreachable(self._card, card, names)
            if found:
                ending = Ending(worker=index, found_by=self._spec.index, reason=found)
                raise self._ask(lambda store, ending=ending: self._place.end(store, ending)).error()  # type: ignore[misc]

    def _wait(self, missing: Sequence[int], refused: str) -> None:
        what = ", ".join(self._spec.name(index) for index in missing) or f"{self._spec.name(0)} to begin"
        note = f" ({refused}, was here and was refused)" if refused else ""
        self._deadline.wait_for(what + note, "start them all, or look at why they ended")

    def _ask(self, call: Callable[[Store], T]) -> T:
        """Has the store asked, and says so while it does not answer."""
        future = self._line.submit(call)
        while True:
            try:
                return future.result(_ANSWER_S)
            except TimeoutError:
                self._deadline.wait_for(
                    f"an answer of the job's store at {self._spec.name(0)}", "its process is stopped or the network cut"
                )

    def _linger(self) -> None:
        """Lets those who came read why it came to nothing, before the store goes."""
        pause, limit = threading.Event(), time.monotonic() + _LINGER_S
        absent = self._peers.all_silent(time.monotonic(), SILENT_S)
        while time.monotonic() < limit and not self._peers.know_of_the_end(absent):
            self._peers.hear(self._line.call(self._look, _ANSWER_S).statuses, time.monotonic())
            pause.wait(_SHORTEST_TURN_S)


def _find_unreachable(mine: Card, theirs: Card, names: tuple[str, str]) -> str:
    """Whether one of two workers on different machines listens where only its own machine reaches it."""
    for card, name in ((mine, names[0]), (theirs, names[1])):
        if mine.host != theirs.host and ipaddress.ip_address(card.address).is_loopback:
            return (
                f"{name} listens at {card.address}, which only its own machine ({card.host}) reaches, and workers are "
                f"on {mine.host} and {theirs.host}; name it by its address in the network, or correct its /etc/hosts"
            )
    return ""
