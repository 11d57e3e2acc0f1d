"""Silence, life and leaving, as one worker counts them: no processes, and times that the test sets."""

from __future__ import annotations

import pytest

from lockstep.membership.heartbeat import ActiveClock, Heartbeat, Peers


def heard(*beats: int, ended: tuple[int, ...] = (), acknowledged: tuple[int, ...] = ()) -> list[Heartbeat]:
    """The heartbeats of workers 1, 2 ... as one reads them."""
    return [
        Heartbeat(count=beat, status=f"step {beat}", ended=rank in ended, acknowledged=rank in acknowledged)
        for rank, beat in enumerate(beats, 1)
    ]


def test_a_beat_that_stays_the_same_is_silence():
    peers = Peers((1, 2), 0.0)
    peers.update(heard(1, 1), 1.0)
    peers.update(heard(1, 2), 5.0)
    assert peers.longest_silent(6.0, 2.0) == (1, 5.0)
    assert peers.longest_silent(6.0, 5.0) is None
    assert peers.status(1) == "step 1"


def test_of_several_that_are_silent_the_longest_is_found():
    peers = Peers((1, 2), 0.0)
    peers.update(heard(1, 1), 1.0)
    peers.update(heard(2, 1), 2.0)
    assert peers.longest_silent(100.0, 5.0) == (2, 99.0)


def test_one_that_has_ended_is_not_silent_but_gone():
    peers = Peers((1, 2), 0.0)
    peers.update(heard(1, 1, ended=(2,)), 1.0)
    peers.update(heard(2, 1, ended=(2,)), 50.0)
    assert peers.longest_silent(99.0, 5.0) == (1, 49.0)
    assert [peers.has_ended(rank) for rank in (0, 1, 2)] == [False, False, True]


def test_the_chief_reads_of_an_alarm():
    peers = Peers((1, 2), 0.0)
    peers.update(heard(1, 1), 1.0)
    assert not peers.any_alarmed()
    peers.update([Heartbeat(count=2), Heartbeat(count=2, alarmed=True)], 2.0)
    assert peers.any_alarmed()


def test_a_time_in_which_nobody_could_be_heard_is_no_silence():
    peers = Peers((1,), 0.0)
    peers.update(heard(1), 1.0)
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
    peers = Peers((1, 2), 0.0)
    peers.update(heard(1, 1, ended=ended, acknowledged=acknowledged), 1.0)
    assert peers.all_acknowledged(but) is known


def test_a_heartbeat_that_cannot_be_read_is_none_yet():
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
