"""The workers of a job as one of them sees it, where there is only one."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.collectives.communicator import ControlFlags, SingleWorkerCommunicator


def test_wishes_are_granted_by_the_next_exchange_and_stay_until_they_are_settled():
    workers = SingleWorkerCommunicator(2)
    workers.set_flags(ControlFlags.LOGS)
    workers.set_flags(ControlFlags.STOP)
    assert workers.agreed_flags == ControlFlags(0)

    workers.all_gather_numbers("wishes")
    workers.all_gather_numbers("later")
    assert workers.agreed_flags == ControlFlags.LOGS | ControlFlags.STOP

    workers.clear_flags(ControlFlags.LOGS)
    assert workers.agreed_flags == ControlFlags.STOP


def test_a_wish_that_comes_during_an_exchange_waits_for_the_next():
    class Interrupted(SingleWorkerCommunicator):
        """A signal comes while the wishes of before are on their way."""

        def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
            sent = self._own_flags
            self.set_flags(ControlFlags.SAVE)
            self._receive_flags(sent, requests=sent)
            return [tuple(numbers)]

    workers = Interrupted(1)
    workers.set_flags(ControlFlags.LOGS)

    workers.all_gather_numbers("the one that the signal comes in")
    assert workers.agreed_flags == ControlFlags.LOGS

    workers.clear_flags(ControlFlags.LOGS)
    workers.all_gather_numbers("the next")
    assert workers.agreed_flags == ControlFlags.SAVE
