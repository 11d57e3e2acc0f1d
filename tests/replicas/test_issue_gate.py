from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lockstep.replicas.issue_gate import IssueGate

LIMIT_S = 10.0


class Interrupted(BaseException):
    pass


class InterruptedLock:
    """A lock whose holder-to-be is interrupted at the moment that it is let in, as an asynchronous exception does."""

    def __init__(self) -> None:
        self.times = 0

    def acquire(self) -> None:
        self.times += 1
        if self.times == 2:
            raise Interrupted

    def release(self) -> None:
        pass


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_as_many_holders_as_the_width():
    turns = IssueGate(2)
    turns.acquire()
    turns.acquire()
    third = threading.Event()

    def take() -> None:
        turns.acquire()
        third.set()

    thread = in_thread(take)
    assert not third.wait(0.05)
    turns.release()
    assert third.wait(LIMIT_S)
    thread.join(LIMIT_S)


def test_turns_are_given_in_the_order_they_were_asked_for():
    turns = IssueGate(1)
    turns.acquire()
    order: list[int] = []
    threads = []
    for number in range(3):

        def take(number: int = number) -> None:
            turns.acquire()
            order.append(number)
            turns.release()

        threads.append(in_thread(take))
        while len(turns._waiting) <= number:  # the next asks only when this one is in the queue
            threads[-1].join(0.001)
    turns.release()
    for thread in threads:
        thread.join(LIMIT_S)

    assert order == [0, 1, 2]


def test_an_interrupted_holder_hands_its_turn_on(monkeypatch: pytest.MonkeyPatch):
    turns = IssueGate(1)
    turns.acquire()
    lock = InterruptedLock()
    monkeypatch.setattr("lockstep.replicas.issue_gate.threading.Lock", lambda: lock)
    with pytest.raises(Interrupted):
        turns.acquire()
    monkeypatch.undo()

    # It gave up its place: the turn that is given back now is free for the next to ask.
    turns.release()
    thread = in_thread(turns.acquire)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
