"""The meeting point alone, with threads of the test's own: who gets what, and what a failed meeting says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.errors import CollectiveError
from lockstep.replicas.barrier import Call, ReplicaBarrier, ReplicaStopped
from lockstep.replicas.issue_gate import IssueGate

NAMES = ["replica 0 (cpu:0)", "replica 1 (cpu:1)", "replica 2 (cpu:2)"]
LIMIT_S = 20.0
SUM = Call("all_reduce(sum)", "train.py:3 in step")
GATHER = Call("all_gather(axis=0)", "train.py:9 in step")
Behaviour = Callable[[ReplicaBarrier, int], Any]


def play(rendezvous: ReplicaBarrier, behaviours: list[Behaviour]) -> list[Any]:
    """Each replica behaves in a thread of its own, then leaves; returns what each returned or raised."""

    def replica(number: int) -> Any:
        try:
            result = behaviours[number](rendezvous, number)
        except BaseException as error:  # noqa: BLE001
            rendezvous.leave(number, error)
            return error
        rendezvous.leave(number)
        return result

    with ThreadPoolExecutor(len(behaviours)) as pool:
        futures = [pool.submit(replica, number) for number in range(len(behaviours))]
        return [future.result(LIMIT_S) for future in futures]


def meet(call: Call) -> Behaviour:
    return lambda rendezvous, number: rendezvous.meet(number, call, number, list, IssueGate(1))


def return_at_once(rendezvous: ReplicaBarrier, number: int) -> None:
    pass


def cause_of(rendezvous: ReplicaBarrier) -> str:
    assert isinstance(rendezvous.cause, CollectiveError)
    return str(rendezvous.cause)


def test_all_get_the_one_result_of_the_values_in_replica_order():
    rendezvous = ReplicaBarrier(NAMES, LIMIT_S)
    first, *others = play(rendezvous, [meet(SUM)] * 3)
    assert first == [0, 1, 2]
    assert all(other is first for other in others)
    assert rendezvous.cause is None
    assert rendezvous.missing == []


def test_one_meeting_after_another():
    def twice(rendezvous: ReplicaBarrier, number: int) -> list[Any]:
        turn = IssueGate(1)
        return [rendezvous.meet(number, SUM, number, sum, turn), rendezvous.meet(number, GATHER, 10, sum, turn)]

    assert play(ReplicaBarrier(NAMES, LIMIT_S), [twice] * 3) == [[3, 30]] * 3


def test_different_collectives_say_who_waits_where():
    rendezvous = ReplicaBarrier(NAMES, LIMIT_S)
    outcomes = play(rendezvous, [meet(SUM), meet(GATHER), meet(SUM)])
    assert sorted(type(outcome).__name__ for outcome in outcomes).count("CollectiveError") == 1
    assert re.search(
        r"did not meet .*replica 1 \(cpu:1\) waits in all_gather\(axis=0\) at train.py:9 in step", cause_of(rendezvous)
    )


def test_a_replica_that_returns_early_is_named():
    rendezvous = ReplicaBarrier(NAMES, LIMIT_S)
    outcomes = play(rendezvous, [meet(SUM), return_at_once, meet(SUM)])
    assert "replica 1 (cpu:1) has returned" in cause_of(rendezvous)
    assert "waits in all_reduce(sum) at train.py:3 in step" in cause_of(rendezvous)
    assert outcomes[1] is None


def test_an_error_of_one_replica_is_the_cause_and_the_others_are_stopped():
    error = ValueError("bad input")

    def fail(rendezvous: ReplicaBarrier, number: int) -> None:
        raise error

    rendezvous = ReplicaBarrier(NAMES, LIMIT_S)
    outcomes = play(rendezvous, [meet(SUM), fail, meet(SUM)])
    assert rendezvous.cause is error
    assert [type(outcomes[0]), type(outcomes[2])] == [ReplicaStopped, ReplicaStopped]


def test_an_error_in_combine_is_the_cause():
    def combine(values: list[int]) -> None:
        raise ZeroDivisionError("of the combination")

    rendezvous = ReplicaBarrier(NAMES, LIMIT_S)
    outcomes = play(rendezvous, [lambda r, number: r.meet(number, SUM, number, combine, IssueGate(1))] * 3)

    assert isinstance(rendezvous.cause, ZeroDivisionError)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "ReplicaStopped",
        "ReplicaStopped",
        "ZeroDivisionError",
    ]


def test_after_the_time_limit_the_missing_replica_is_named():
    rendezvous = ReplicaBarrier(NAMES[:2], timeout_s=0.05)
    computing = threading.Event()

    def compute(rendezvous: ReplicaBarrier, number: int) -> None:
        rendezvous.wait_until_settled()
        computing.set()
        meet(SUM)(rendezvous, number)

    outcomes = play(rendezvous, [meet(SUM), compute])

    assert computing.is_set()
    assert "nobody else came within 0.05 s" in cause_of(rendezvous)
    assert "replica 1 (cpu:1) is still running" in cause_of(rendezvous)
    assert isinstance(outcomes[1], ReplicaStopped)


def test_abort_stops_those_who_wait_and_those_who_come_later():
    rendezvous = ReplicaBarrier(NAMES[:2], LIMIT_S)

    def abort_then_meet(rendezvous: ReplicaBarrier, number: int) -> None:
        rendezvous.abort(KeyboardInterrupt())
        meet(SUM)(rendezvous, number)

    outcomes = play(rendezvous, [meet(SUM), abort_then_meet])
    assert isinstance(rendezvous.cause, KeyboardInterrupt)
    assert [type(outcome) for outcome in outcomes] == [ReplicaStopped, ReplicaStopped]


def test_a_turn_is_given_up_while_waiting():
    # With one turn for both, the second can only meet the first if the first has given its turn up.
    turns = IssueGate(1)

    def in_turn(rendezvous: ReplicaBarrier, number: int) -> Any:
        turns.acquire()
        try:
            return rendezvous.meet(number, SUM, number, sum, turns)
        finally:
            turns.release()

    assert play(ReplicaBarrier(NAMES[:2], LIMIT_S), [in_turn] * 2) == [1, 1]


def test_waiting_for_the_end_has_a_limit():
    rendezvous = ReplicaBarrier(NAMES[:1], LIMIT_S)
    assert not rendezvous.wait_until_left(0.01)
    assert rendezvous.missing == NAMES[:1]
    rendezvous.leave(0)
    assert rendezvous.wait_until_left(0.01)
