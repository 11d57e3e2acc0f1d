"""The roll call: every worker takes its seat in the store, and nobody goes on before all are there and agree.

seat/0 .. seat/n-1   who came, one card each, taken by compare-and-set: the first process of a number has it
beat/0 .. beat/n-1   that they are still there; a seat whose process has gone silent may be taken over
complete             all cards, written by worker 0 when every seat is taken and all agree
ending               why it came to nothing, written by whoever finds out; all raise it
"""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lockstep.cluster.board import COMPLETE_KEY, ENDING_KEY, beat_key, end_job, read, seat_key
from lockstep.cluster.card import Card, find_disagreement, read_card
from lockstep.cluster.deadline import Deadline
from lockstep.cluster.ending import Ending, describe_failure, read_ending
from lockstep.cluster.line import Line, StoreBrokenError, StoreSilentError
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.status import Status
from lockstep.errors import ClusterError

TURN_S = 0.2
_RIVAL_IS_GONE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class _View:
    """The roll call as the store shows it."""

    seats: tuple[str, ...]
    own_beat: str
    complete: str
    ending: str


class RollCall:
    """One worker's part in the roll call.

    Args:
        spec: the cluster, and this worker's number.
        card: what this worker says of itself.
        line: the connection to the job's part of the store.
        deadline: until when to wait.
    """

    def __init__(self, spec: ClusterSpec, card: Card, line: Line, deadline: Deadline) -> None:
        self._spec = spec
        self._card = card
        self._line = line
        self._deadline = deadline
        self._beat = 0
        self._rival: tuple[str, str, float] | None = None
        self._missing: tuple[int, ...] = tuple(i for i in range(spec.num_workers) if i != spec.index)

    def answer(self) -> tuple[Card, ...]:
        """Waits until all workers are there and agree; their cards in worker order.

        Raises:
            ClusterError: somebody is missing at the deadline, disagrees, or has this worker's number already.
            StoreBrokenError, StoreSilentError: the store went away; the caller may look for it again.
        """
        pause = threading.Event()
        while True:
            view = self._line.call(self._look, self._deadline.left_s)
            if cards := self._heed(view):
                return cards
            self._deadline.wait_for(self._missing_names(), "start them, or look at why they ended")
            pause.wait(TURN_S)

    def give_up(self, error: BaseException) -> None:
        """Leaves the roll call: worker 0 ends it for all, any other frees its seat for a process that comes later."""
        try:
            if self._spec.index == 0:
                reason = str(error)
                if not isinstance(error, ClusterError):
                    reason = describe_failure(self._spec.name(0), error, "the roll call")
                self._line.call(lambda store: end_job(store, Ending(worker=0, reason=reason)), TURN_S * 5)
            else:
                self._line.call(self._stand_up, TURN_S * 5)
        except (StoreBrokenError, StoreSilentError):
            return  # nobody left to tell

    def _look(self, store: Store) -> _View:
        own = store.compare_set(seat_key(self._spec.index), "", self._card.to_text()).decode()
        ending = read(store, ENDING_KEY)
        if own == self._card.to_text():
            self._beat += 1
            status = Status(beat=self._beat, doing="the roll call", warned=bool(ending))
            store.set(beat_key(self._spec.index), status.to_text())
        return _View(
            seats=tuple(read(store, seat_key(index)) for index in range(self._spec.num_workers)),
            own_beat=read(store, beat_key(self._spec.index)),
            complete=read(store, COMPLETE_KEY),
            ending=ending,
        )

    def _heed(self, view: _View) -> tuple[Card, ...] | None:
        if view.ending:
            raise read_ending(view.ending).error()
        if view.seats[self._spec.index] != self._card.to_text():
            self._face_rival(view)
            return None
        if view.complete:
            return tuple(read_card(text) for text in json.loads(view.complete))
        cards = {index: read_card(text) for index, text in enumerate(view.seats) if text}
        self._compare(cards)
        self._missing = tuple(index for index in range(self._spec.num_workers) if index not in cards)
        if self._missing or self._spec.index != 0:
            return None
        self._complete(view.seats)
        return tuple(cards[index] for index in range(self._spec.num_workers))

    def _compare(self, cards: dict[int, Card]) -> None:
        for index, card in cards.items():
            names = (self._spec.name(self._spec.index), f"worker {index} ({card.process})")
            if found := find_disagreement(self._card, card, names):
                raise self._end_for_all(Ending(worker=index, reason=found))
            if found := _find_unreachable(self._card, card, names):
                raise self._end_for_all(Ending(worker=index, reason=found))

    def _end_for_all(self, ending: Ending) -> ClusterError:
        first = self._line.call(lambda store: end_job(store, ending), self._deadline.left_s)
        return first.error()

    def _complete(self, seats: Sequence[str]) -> None:
        self._line.call(lambda store: store.set(COMPLETE_KEY, json.dumps(seats)), self._deadline.left_s)

    def _stand_up(self, store: Store) -> None:
        store.compare_set(seat_key(self._spec.index), self._card.to_text(), "")

    def _face_rival(self, view: _View) -> None:
        """Another process has this worker's seat: refuses to go on if it lives, takes its seat if it does not."""
        seat, now = view.seats[self._spec.index], time.monotonic()
        if not seat:
            return
        if self._rival is None or self._rival[0] != seat:
            self._rival = (seat, view.own_beat, now)
        _, beat, since = self._rival
        rival, name = read_card(seat), self._spec.name(self._spec.index)
        if view.own_beat != beat:
            raise ClusterError(
                f"{name} is there already: {rival.process}; this is {self._card.process}. "
                "Give every process an index of its own, or end that one first"
            )
        if now - since > _RIVAL_IS_GONE_S:
            if view.complete:
                raise ClusterError(
                    f"the job has begun without this process: {name} was {rival.process}, which no longer answers; "
                    "end the other workers and start all of them again"
                )
            mine = self._card.to_text()
            self._line.call(lambda store: store.compare_set(seat_key(rival.index), seat, mine), self._deadline.left_s)

    def _missing_names(self) -> str:
        return ", ".join(self._spec.name(index) for index in self._missing) or "worker 0 to begin"


def _find_unreachable(mine: Card, theirs: Card, names: tuple[str, str]) -> str:
    """Whether one of two workers on different machines listens where only its own machine reaches it."""
    for card, name in ((mine, names[0]), (theirs, names[1])):
        if mine.host != theirs.host and ipaddress.ip_address(card.address).is_loopback:
            return (
                f"{name} listens at {card.address}, which only its own machine ({card.host}) reaches, and workers are "
                f"on {mine.host} and {theirs.host}; name it by its address in the network, or correct its /etc/hosts"
            )
    return ""
