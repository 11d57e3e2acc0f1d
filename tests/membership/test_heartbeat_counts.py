"""Silence, life and leaving, as one worker counts them: no processes, and times that the test sets."""

from __future__ import annotations

import pytest

from lockstep.membership.heartbeat import ActiveClock, Heartbeat, Peers


def heard(*beats: int, ended: tuple[int, ...] = (), acknowledged: tuple[int, ...] = ()) -> list[Heartbeat]:
    return [
        Heartbeat(count=beat, status=f"step {beat}", ended=index in ended, acknowledged=index in acknowledged)
        for index, beat in enumerate(beats)
    ]


def test_a_beat_that_stays_the_same_is_silence():
    peers = Peers(3, 0, 0.0)
    peers.update(heard(1, 1, 1), 1.0)
    peers.update(heard(1, 1, 2), 5.0)

    assert peers.longest_silent(6.0, 2.0) == (1, 5.0)
    assert peers.longest_silent(6.0, 5.0) is None
    assert peers.status(1) == "step 1"


def test_the_longest_silent_is_found_and_never_the_listener_itself():
    peers = Peers(3, 0, 0.0)
    peers.update(heard(1, 1, 1), 1.0)
    peers.update(heard(1, 2, 1), 2.0)

    assert peers.longest_silent(100.0, 5.0) == (2, 99.0)


def test_one_that_has_ended_is_not_silent_but_gone():
    peers = Peers(3, 0, 0.0)
    peers.update(heard(1, 1, 1, ended=(2,)), 1.0)
    peers.update(heard(2, 1, 1, ended=(2,)), 50.0)

    assert peers.longest_silent(50.0, 5.0) == (1, 49.0)
    assert peers.has_ended(2)
    assert peers.first_ended(1.5, 1.0) is None
    assert peers.first_ended(2.0, 1.0) == 2


def test_a_time_in_which_nobody_could_be_heard_is_no_silence():
    peers = Peers(2, 0, 0.0)
    peers.update(heard(1, 1), 1.0)
    peers.excuse(30.0)
    peers.excuse(-5.0)

    assert peers.longest_silent(35.0, 5.0) is None
    assert peers.longest_silent(37.0, 5.0) == (1, 6.0)


@pytest.mark.parametrize(
    ("ended", "acknowledged", "but", "known"),
    [((), (), (), False), ((1,), (2,), (), True), ((1,), (), (), False), ((1,), (), (2,), True)],
)
def test_the_store_may_go_when_all_others_know_of_it(
    ended: tuple[int, ...], acknowledged: tuple[int, ...], but: tuple[int, ...], known: bool
):
    peers = Peers(3, 0, 0.0)
    peers.update(heard(1, 1, 1, ended=ended, acknowledged=acknowledged), 1.0)

    assert peers.all_acknowledged(but) is known


def test_a_status_that_cannot_be_read_has_not_spoken():
    heartbeat = Heartbeat(count=3, status="x", acknowledged=True)

    assert {Heartbeat.from_json(text) for text in ("", "{", '{"other": 1}')} == {Heartbeat()}
    assert Heartbeat.from_json(heartbeat.to_json()) == heartbeat


def test_a_stop_of_the_process_is_not_lived_through(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = ActiveClock(2.0)
    for step_s in (0.5, 1.0, 3600.0):
        now[0] += step_s
        clock.advance()

    assert clock.now_s == 3.5
