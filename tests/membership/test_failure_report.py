"""The sentences that end a job: who, what, where; in one line."""

from __future__ import annotations

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError, ConfigError
from lockstep.membership.failure_report import (
    FailureReport,
    JobStatus,
    describe_exception,
    describe_loss,
    last_traceback_lines,
)
from lockstep.membership.membership import join
from lockstep.membership.worker_info import WorkerInfo, find_disagreement


def noted(error: BaseException, *notes: str) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "doing", "sentence"),
    [
        (ValueError("no\npicture"), "step 3", "worker 1 failed with ValueError: no picture; it was in step 3"),
        (KeyError(), "", "worker 1 failed with KeyError"),
        (
            noted(OSError("gone"), "raised in replica 3 (cpu:1)", "a\nlong note"),
            "",
            "worker 1 failed with OSError: gone [raised in replica 3 (cpu:1)]",
        ),
        (KeyboardInterrupt(), "step 3", "worker 1 was interrupted (Ctrl-C); it was in step 3"),
        (SystemExit(3), "", "worker 1 ended itself with exit code 3"),
    ],
)
def test_a_failure_in_one_line(error: BaseException, doing: str, sentence: str):
    assert describe_exception("worker 1", error, doing) == sentence


def test_a_long_message_is_cut():
    assert len(describe_exception("worker 1", ValueError("x" * 10_000), "")) < 700


def test_a_loss_says_for_how_long_and_what_it_last_did():
    assert describe_loss("worker 1", "no heartbeat for 12.3 s", "step 3").startswith(
        "worker 1 is lost: no heartbeat for 12.3 s (last status: step 3)."
    )
    assert "(last status: unknown)" in describe_loss("worker 1", "no answer", "")


def test_an_ending_is_read_as_it_was_written_and_one_that_cannot_be_read_still_ends():
    report = FailureReport(worker=1, reporter=0, reason="worker 1 is lost", traceback="line\nline")
    assert FailureReport.from_json(report.to_json()) == report
    assert "'nonsense'" in FailureReport.from_json("nonsense").reason
    assert report.error().__notes__ == ["Traceback of worker 1, its last lines:\nline\nline"]
    assert report.error() is not report.error()


def test_a_traceback_is_shortened_to_its_end():
    def deep(level: int) -> None:
        if not level:
            raise ValueError("at the bottom")
        deep(level - 1)

    with pytest.raises(ValueError, match="at the bottom") as caught:
        deep(40)

    lines = last_traceback_lines(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[-1] == "ValueError: at the bottom"


def test_the_first_end_stays_and_is_told_once():
    job, told = JobStatus(), []
    job.subscribe(lambda error: told.append(str(error)))
    first = FailureReport(worker=1, reporter=0, reason="the first")
    assert job.fail(first) is first
    assert job.fail(FailureReport(worker=2, reporter=0, reason="the second")) is first
    job.subscribe(lambda error: told.append(f"late: {error}"))
    assert told == ["the first", "late: the first"]


def worker(index: int = 0, **terms: str) -> WorkerInfo:
    return WorkerInfo(
        rank=index, host="hosta", pid=4242, address="10.0.0.1", token="t", info={"replicas": 2}, terms=terms
    )


def test_a_card_is_read_as_it_was_written():
    assert WorkerInfo.from_json(worker(torch="2.13").to_json()) == worker(torch="2.13")
    with pytest.raises(ClusterError, match="the job's store has an unreadable worker info"):
        WorkerInfo.from_json('{"rank": 0}')


def test_a_disagreement_names_both_workers_and_both_values():
    names = ("worker 0 (a:1)", "worker 1 (process 4242 on hosta)")
    mine, theirs = worker(torch="2.13"), worker(1, torch="2.12")
    assert find_disagreement(mine, mine, names) == ""
    said = find_disagreement(mine, theirs, names)
    assert all(part in said for part in (*names, "torch", "2.12", "2.13"))
    assert "torch is unknown on worker 1" in find_disagreement(mine, worker(1), names)


@pytest.mark.parametrize("name", ["timeout_s", "lost_after_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_times_must_be_times(name: str, value: float):
    with pytest.raises(ConfigError, match=f"{name}=.* was given, expected a number of seconds above 0"):
        join(ClusterSpec(workers=["127.0.0.1:20000"], index=0), **({"timeout_s": 1.0} | {name: value}))


def test_an_evaluator_is_no_member():
    spec = ClusterSpec(workers=["127.0.0.1:20000"], index=0, task="evaluator")
    with pytest.raises(ClusterError, match="an evaluator does not take part in the training"):
        join(spec, timeout_s=1.0)
