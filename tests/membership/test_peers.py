"""Silence, life and leaving, as one worker counts them: no processes, and times that the test sets."""

from __future__ import annotations

import pytest

from lockstep.membership.heartbeat import LivedClock, Peers, Status, read_status


def heard(*beats: int, ended: tuple[int, ...] = (), warned: tuple[int, ...] = ()) -> list[Status]:
    return [
        Status(beat=beat, doing=f"step {beat}", ended=index in ended, warned=index in warned)
        for index, beat in enumerate(beats)
    ]


def test_a_beat_that_stays_the_same_is_silence():
    peers = Peers(3, 0, 0.0)
    peers.hear(heard(1, 1, 1), 1.0)
    peers.hear(heard(1, 1, 2), 5.0)

    assert peers.all_silent(6.0, 2.0) == {1: 5.0}
    assert peers.find_silent(6.0, 2.0) == 1
    assert peers.find_silent(6.0, 5.0) is None
    assert peers.silence(1, 6.0) == (5.0, "step 1")


def test_the_longest_silent_is_found_and_never_the_listener_itself():
    peers = Peers(3, 0, 0.0)
    peers.hear(heard(1, 1, 1), 1.0)
    peers.hear(heard(1, 2, 1), 2.0)

    assert peers.find_silent(100.0, 5.0) == 2


def test_one_that_has_ended_is_not_silent_but_gone():
    peers = Peers(3, 0, 0.0)
    peers.hear(heard(1, 1, 1, ended=(2,)), 1.0)
    peers.hear(heard(2, 1, 1, ended=(2,)), 50.0)

    assert peers.all_silent(50.0, 5.0) == {1: 49.0}
    assert peers.has_ended(2)
    assert peers.find_left(1.5, 1.0) is None
    assert peers.find_left(2.0, 1.0) == 2


def test_a_time_in_which_nobody_could_be_heard_is_no_silence():
    peers = Peers(2, 0, 0.0)
    peers.hear(heard(1, 1), 1.0)
    peers.excuse(30.0)
    peers.excuse(-5.0)

    assert peers.find_silent(35.0, 5.0) is None
    assert peers.find_silent(37.0, 5.0) == 1


def test_the_first_beat_heard_may_be_an_old_one():
    peers = Peers(1, -1, 0.0)
    for now_s in (1.0, 2.0):
        peers.hear(heard(17), now_s)
        assert peers.signs_of_life(0) == 1
    peers.hear(heard(18), 3.0)

    assert peers.signs_of_life(0) == 2


@pytest.mark.parametrize(
    ("ended", "warned", "but", "known"),
    [((), (), (), False), ((1,), (2,), (), True), ((1,), (), (), False), ((1,), (), (2,), True)],
)
def test_the_store_may_go_when_all_others_know_of_it(
    ended: tuple[int, ...], warned: tuple[int, ...], but: tuple[int, ...], known: bool
):
    peers = Peers(3, 0, 0.0)
    peers.hear(heard(1, 1, 1, ended=ended, warned=warned), 1.0)

    assert peers.know_of_the_end(but) is known


def test_a_status_that_cannot_be_read_has_not_spoken():
    assert read_status("") == read_status("{") == read_status('{"other": 1}') == Status(beat=-1)
    assert read_status(Status(beat=3, doing="x", warned=True).to_text()) == Status(beat=3, doing="x", warned=True)


def test_a_stop_of_the_process_is_not_lived_through(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = LivedClock(2.0)
    for step_s in (0.5, 1.0, 3600.0):
        now[0] += step_s
        clock.advance()

    assert clock.now_s == 3.5
