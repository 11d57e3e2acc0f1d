"""Who counts as lost in an elastic job, and who has failed."""

from __future__ import annotations

import pytest

from lockstep.launch.elastic_agent import find_casualties
from lockstep.launch.failures import FailureRecord, WorkerFailure
from lockstep.membership.failure_report import FailureReport


def ended(worker: int, exit_code: int, error: str = "") -> WorkerFailure:
    record = FailureRecord(at_ns=1, error=error, traceback="") if error else None
    return WorkerFailure(worker=worker, attempt=0, exit_code=exit_code, at_ns=1, record=record)


KILLED, LOST = "worker 4 was killed by SIGKILL", "worker 5 is lost: no heartbeat for 12.0 s"
SILENT = FailureReport(worker=5, reporter=4, reason=f"{LOST} (last status: a step). Look at its machine")
RAISED = FailureReport(worker=5, reporter=5, reason="worker 5 failed with ValueError: no data", traceback="line 1")


@pytest.mark.parametrize(
    ("failures", "running", "report", "lost", "failed"),
    [
        ({0: ended(4, -9)}, {1: False}, None, {0: KILLED}, False),
        ({0: ended(4, -11)}, {1: False}, None, {}, True),
        ({0: ended(4, 3)}, {1: False}, None, {}, True),
        ({0: ended(4, 1, "ValueError: no data")}, {1: False}, None, {}, True),
        # One that is killed, and one that fails because of it:
        ({0: ended(4, -9), 1: ended(5, 1, "RuntimeError: closed")}, {}, None, {0: KILLED}, True),
        # What the workers have told each other:
        ({0: ended(4, 1, "ClusterError: lost")}, {1: True}, SILENT, {1: LOST}, False),
        ({0: ended(4, 1, "ClusterError: lost")}, {1: False}, SILENT, {1: LOST}, False),
        ({1: ended(5, 1, "ClusterError: cut")}, {0: False}, SILENT, {1: LOST}, False),
        ({0: ended(4, 1, "ClusterError: failed")}, {1: False}, RAISED, {}, False),
        ({0: ended(4, 1, "ClusterError"), 1: ended(5, 1, "ValueError")}, {}, RAISED, {}, True),
        ({}, {0: True, 1: False}, None, {0: "worker 4 was stopped"}, False),
    ],
)  # fmt: skip
def test_lost_workers_are_told_from_failures_and_from_their_victims(failures, running, report, lost, failed):
    found = find_casualties(failures, running, report, first_worker=4)
    assert (found.losses, found.has_failed) == (lost, failed)
