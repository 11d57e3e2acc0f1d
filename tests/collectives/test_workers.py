"""The workers of a job as one of them sees it, where there is only one."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.collectives.communicator import OneWorker, Wish


def test_wishes_are_granted_by_the_next_exchange_and_stay_until_they_are_settled():
    workers = OneWorker(2)
    workers.wish(Wish.LOGS)
    workers.wish(Wish.STOP)
    assert workers.granted == Wish(0)

    workers.exchange("wishes")
    workers.exchange("later")
    assert workers.granted == Wish.LOGS | Wish.STOP

    workers.settle(Wish.LOGS)
    assert workers.granted == Wish.STOP


def test_a_wish_that_comes_during_an_exchange_waits_for_the_next():
    class Interrupted(OneWorker):
        """A signal comes while the wishes of before are on their way."""

        def exchange(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
            sent = self._wishes
            self.wish(Wish.SAVE)
            self._grant(sent, sent=sent)
            return [tuple(numbers)]

    workers = Interrupted(1)
    workers.wish(Wish.LOGS)

    workers.exchange("the one that the signal comes in")
    assert workers.granted == Wish.LOGS

    workers.settle(Wish.LOGS)
    workers.exchange("the next")
    assert workers.granted == Wish.SAVE
