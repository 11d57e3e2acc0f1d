"""Members that are killed, stopped, that fail or end: all others know in time who it was, and why."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.membership.conftest import MakeMembers, Member

pytestmark = pytest.mark.workers

LOST_AFTER_S = 2.0
NOISE_S = 2.0
QUIET_S = 1.0


def waiting(*members: Member) -> None:
    for member in members:
        member.begin("wait", 30.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_goes_silent_is_lost_on_all_others(
    members: MakeMembers, addresses: list[str], number: signal.Signals
):
    job = members(3)
    job[1].do("doing", "the update of step 7")
    assert job[0].do("wait", QUIET_S) == "nothing happened"
    waiting(job[0], job[2])
    at_s = job[1].send(number)

    answers = [job[0].answer(), job[2].answer()]

    for said in answers:
        assert said.error.startswith(
            f"worker 1 (127.0.0.2:{said.error.split(':')[1][:5].rstrip(')')}) is lost: no heartbeat"
        )
        assert "last status: the update of step 7" in said.error
        assert said.at_s - at_s < LOST_AFTER_S + NOISE_S
    assert answers[0].error == answers[1].error
    assert [thread for thread, _ in job[0].do("called")] == ["lockstep-heartbeat"]
    assert job[2].do("called") == [("lockstep-heartbeat", answers[0].error)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_chief_is_lost_with_its_store(members: MakeMembers, number: signal.Signals):
    job = members(3)
    job[0].do("doing", "the sum of gradients of step 3")
    assert job[1].do("wait", QUIET_S) == "nothing happened"
    waiting(job[1], job[2])
    at_s = job[0].send(number)

    for member in job[1:]:
        said = member.answer()
        assert "worker 0 (127.0.0.1:" in said.error
        assert "which serves the job's store, is lost: " in said.error
        assert "last status: the sum of gradients of step 3" in said.error
        assert said.at_s - at_s < LOST_AFTER_S + NOISE_S
        assert len(member.do("called")) == 1
        assert member.do("close") < 3.0


@pytest.mark.slow
def test_a_worker_that_was_stopped_learns_that_it_was_given_up(members: MakeMembers):
    job = members(2)
    waiting(job[0])
    job[1].send(signal.SIGSTOP)
    error = job[0].answer().error
    job[1].send(signal.SIGCONT)
    assert job[1].error("wait", 10.0).startswith(error)
    assert "this worker itself was stopped or cut off" in job[1].error("wait", 10.0)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_short_stop_is_no_loss(members: MakeMembers, stopped: int):
    job = members(2, lost_after_s=4.0)
    waiting(job[1 - stopped])
    job[stopped].send(signal.SIGSTOP)
    subprocess.run(["sleep", "1"], check=True)  # a stop lasts a time, and nothing can be waited for meanwhile
    job[stopped].send(signal.SIGCONT)
    assert job[stopped].do("wait", QUIET_S) == "nothing happened"
    assert not job[1 - stopped].has_answered()


@pytest.mark.slow
def test_a_failure_is_the_same_cause_on_all(members: MakeMembers):
    job = members(3)
    waiting(job[0], job[1])
    job[2].do("doing", "the update of step 4")
    job[2].do("fail", "no such\npicture")

    for said in (job[0].answer(), job[1].answer()):
        assert said.error.startswith("worker 2 (127.0.0.3:")
        assert "ValueError: no such picture [raised in replica 3 (cpu:1)]" in said.error
        assert said.error.endswith("the update of step 4")
        assert "ValueError: no such" in said.notes[0]
        assert "raise ValueError(text)" in said.notes[0]
    assert job[2].do("called") == []


@pytest.mark.slow
def test_the_first_cause_stays(members: MakeMembers):
    job = members(3)
    job[1].do("fail", "the first")
    job[2].do("fail", "the second")
    errors = {member.error("wait", 10.0) for member in job}
    assert len(errors) == 1
    assert "the first" in errors.pop()


@pytest.mark.slow
@pytest.mark.parametrize("waiting_for_it", [(0, 2), (2,)])
def test_a_broken_connection_is_explained_sooner_than_silence_is(members: MakeMembers, waiting_for_it: tuple[int, ...]):
    job = members(3, lost_after_s=10.0)
    assert job[0].do("wait", QUIET_S) == "nothing happened"
    at_s = job[1].send(signal.SIGKILL)
    for index in waiting_for_it:
        job[index].begin("explain", "Connection closed by peer [127.0.0.2]:4")

    for index in waiting_for_it:
        said = job[index].answer()
        assert "worker 1 (127.0.0.2:" in said.error
        assert "is lost" in said.error
        assert f"worker {index} (127.0.0.{index + 1}:" in said.error
        assert said.error.endswith("waited in the sum of gradients")
        assert said.at_s - at_s < 6.0


@pytest.mark.slow
def test_a_broken_connection_between_living_workers_names_both(members: MakeMembers):
    job = members(2, lost_after_s=1.0)
    error = job[0].error("explain", "[/src/pair.cc:1] Read error [127.0.0.2]:4. This is typically caused by people")
    assert error.startswith("worker 0 (127.0.0.1:")
    assert " and worker 1 (127.0.0.2:" in error
    assert "can no longer reach each other although both are alive" in error
    assert error.endswith("waited in the sum of gradients: Read error [127.0.0.2]:4")
    assert job[1].error("wait", 10.0) == error


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_worker_that_ends_is_missed_only_by_those_who_wait_for_it(members: MakeMembers, first: int):
    job = members(3)
    job[first].do("close")
    others = [member for index, member in enumerate(job) if index != first]
    waiting(others[0])
    assert f"worker {first} (127.0.0.{first + 1}:" in (error := others[0].answer().error)
    assert "has ended while worker" in error
    assert others[1].do("called") == []
    assert others[1].do("close") < LOST_AFTER_S


@pytest.mark.slow
def test_the_chief_ends_first_and_nobody_minds(members: MakeMembers):
    job = members(3)
    assert job[0].do("close") < LOST_AFTER_S
    job[0].end()
    job[1].do("work_alone", QUIET_S)
    assert [member.do("called") for member in job[1:]] == [[], []]
    assert all(member.do("close") < 1.0 for member in job[1:])
    assert all(member.do("threads") == [] for member in job[1:])


@pytest.mark.slow
def test_nothing_is_left_of_a_member_that_has_closed(members: MakeMembers):
    job = members(2)
    assert {"lockstep-store", "lockstep-heartbeat"} <= set(job[0].do("threads"))
    for member in job[::-1]:
        member.do("close")
        member.do("close")
    assert [member.do("threads") for member in job] == [[], []]


@pytest.mark.slow
def test_one_who_fails_over_another_that_left_says_who_left(members: MakeMembers):
    job = members(3)
    job[1].do("close")
    error = job[0].error("wait", 10.0)
    job[0].do("fail_with_last")
    # It may have found so much itself by then.
    assert job[2].error("wait", 10.0).partition(" while ")[0] == error.partition(" while ")[0]
    assert all(text == error for _, text in job[2].do("called"))


@pytest.mark.slow
def test_what_others_are_doing_is_read_when_it_is_asked_for(members: MakeMembers):
    job = members(3)
    for member, text in zip(job, ("step 3", "step 4", "step 3"), strict=True):
        member.do("doing", text)
    assert job[0].do("wait", QUIET_S) == "nothing happened"
    assert re.fullmatch(r"worker 1 \(127.0.0.2:\d+\) was last in step 4", job[0].do("other_statuses"))
    assert re.fullmatch(r"worker 1 \(127.0.0.2:\d+\) was last in step 4", job[2].do("other_statuses"))
    assert len(re.findall("was last in step 3", job[1].do("other_statuses"))) == 2


@pytest.mark.slow
def test_a_fork_of_a_member_is_none(members: MakeMembers):
    job = members(2)
    job[1].do("fork")
    assert job[0].do("wait", QUIET_S) == "nothing happened"
    assert job[1].do("wait", QUIET_S) == "nothing happened"


PROGRAM = """
import sys
from lockstep.membership.membership import join
from lockstep.cluster.spec import ClusterSpec

member = join(ClusterSpec(workers={workers!r}, index=1), timeout_s=60.0, lost_after_s=2.0)
member.set_status("its last step")
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("raise ValueError('no such picture')", "failed with ValueError: no such picture; it was in its last step"),
        ("sys.exit(3)", "has ended while worker 0"),
    ],
)
def test_the_end_of_the_interpreter_is_an_end_like_any_other(
    start: Callable[..., Member], addresses: list[str], end: str, expected: str
):
    chief = start({"workers": addresses[:2], "index": 0}).begin("join")
    program = PROGRAM.format(workers=addresses[:2], end=end)
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert chief.answer().error == ""
    began = time.monotonic()
    said = chief.begin("wait", 30.0).answer()
    assert said.error.startswith(f"worker 1 ({addresses[1]}) {expected}")
    assert said.at_s - began < LOST_AFTER_S


@pytest.mark.slow
def test_an_error_in_the_thread_of_the_heartbeat_ends_the_job(members: MakeMembers):
    chief, other = members(2)
    chief.do("pretend", "lockstep.membership.heartbeat", "describe_loss", None)
    other.send(signal.SIGKILL)
    assert "the heartbeat of worker 0" in (error := chief.error("wait", 30.0))
    assert "failed with TypeError" in error
