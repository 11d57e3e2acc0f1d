"""What the launchers of an elastic job decide together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep._torch_compat import HashStore
from lockstep.errors import ClusterError, ConfigError
from lockstep.launch.elastic_meeting import Attendance, Elastic, HostRecord
from lockstep.launch.elastic_plan import HostState, Plan, decide
from lockstep.launch.store_link import StoreLink


def host(index: int = 0, **changes: Any) -> HostState:
    return HostState(**{"index": index, "name": f"host {index}", "capacity": 4, "survivors": 4, **changes})


def plan(*hosts: HostState, before: tuple[HostState, ...] = (), minimum: int = 2, max_restarts: int = 0) -> Plan | None:
    return decide(hosts, before, minimum=minimum, max_restarts=max_restarts)


def sizes(decided: Plan | None) -> tuple[int, ...]:
    assert not decided.end
    return decided.sizes


def test_a_job_begins_without_a_word_once_there_are_enough_workers():
    assert plan(host(), minimum=5) is None
    assert plan(host(), host(1), minimum=5) == Plan(sizes=(4, 4))


def test_those_that_are_left_go_on():
    lost = host(survivors=2, losses=("worker 1 was killed by SIGKILL", "worker 3 was stopped"))
    decided = plan(lost, before=(host(),))
    assert sizes(decided) == (2,)
    assert decided.line == "worker 1 was killed by SIGKILL; worker 3 was stopped; 2 workers go on"


def test_a_host_may_go_and_come():
    both = (host(), host(1))
    alone = plan(both[0], before=both)
    again = plan(*both, before=both[:1])
    assert (sizes(alone), sizes(again)) == ((4,), (4, 4))
    assert alone.line == "host 1 is gone; 4 workers go on"
    assert again.line == "host 1 has joined; 8 workers go on"


def test_a_host_without_workers_starts_none_until_its_slots_are_filled_again():
    before = (host(), host(1))
    assert sizes(plan(host(), host(1, survivors=0, losses=("worker 4 was killed by SIGKILL",)), before=before)) == (
        4,
        0,
    )
    assert plan(host(), host(1, back=4), before=before).line == "4 lost workers are back; 8 workers go on"


@pytest.mark.parametrize("survivors", [0, 1])
def test_fewer_than_the_minimum_start_anew_as_often_as_allowed(survivors: int):
    lost = host(survivors=survivors, losses=("worker 1 was killed by SIGKILL",))
    again = plan(lost, before=(host(),), max_restarts=1)
    over = plan(host(survivors=survivors, losses=lost.losses, restarts=1), before=(host(),), max_restarts=1)
    assert (sizes(again), again.restarts) == ((4,), 1)
    assert over.end == f"worker 1 was killed by SIGKILL; {survivors} left of at least 2"


def test_a_failure_of_the_program_ends_the_job_but_not_one_after_a_loss():
    failed = host(failure="worker 1 of 8 failed: ValueError: no data")
    before = (host(), host(1))

    assert plan(failed, host(1), before=before).end == "worker 1 of 8 failed: ValueError: no data"
    assert sizes(plan(failed, host(1), before=before, max_restarts=1)) == (4, 4)
    # A program without Lockstep fails with whatever its connection raises.
    assert sizes(plan(failed, host(1, survivors=3, losses=("worker 5 was killed by SIGKILL",)), before=before)) == (
        4,
        3,
    )
    assert sizes(plan(failed, before=before)) == (4,)
    # One that was cut off comes back, and its workers had failed without the others.
    assert sizes(plan(host(), host(1, failure=failed.failure), before=(host(),))) == (4, 4)


def test_the_job_is_done_when_all_hosts_are():
    before = (host(), host(1))
    assert plan(host(finished=True), host(1, finished=True), before=before).finished
    assert sizes(plan(host(finished=True), host(1), before=before)) == (4, 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"minimum": 0, "maximum": 4}, "workers=0:4 was given, expected at least 1 each"),
        ({"minimum": 1, "maximum": 0}, "workers=1:0 was given, expected at least 1 each"),
        ({"minimum": 1, "maximum": 4, "rejoin_s": 0}, "rejoin_s=0 was given, expected a number of seconds above 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        Elastic(**settings)


@pytest.fixture
def link() -> Iterator[StoreLink]:
    link = StoreLink(HashStore)
    yield link
    link.close()


def test_a_launcher_is_there_as_long_as_its_number_changes(link: StoreLink):
    record = HostRecord(ticket="1", state=host())
    link.set("lockstep/launch/host/0", record.to_json())
    link.set("lockstep/launch/beat/0", "1")
    attendance = Attendance(link, 1)

    assert attendance.look(60) == [record]
    assert attendance.look(0) == []
    link.set("lockstep/launch/host/0", "")
    link.set("lockstep/launch/beat/0", "2")
    assert attendance.look(60) == []


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"ticket": "1", "state": {"index": 0}}'])
def test_what_a_stranger_writes_into_the_store_is_refused(link: StoreLink, text: str):
    link.set("lockstep/launch/host/0", text)
    link.set("lockstep/launch/beat/0", "1")
    with pytest.raises(ClusterError, match="something else than what launchers tell each other"):
        Attendance(link, 1).look(60)
