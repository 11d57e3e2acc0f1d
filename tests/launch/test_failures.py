"""Which worker failed first, what is said about it, and the exit code."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.launch.agent import Agent, Limits, WorkerSetup
from lockstep.launch.failures import FailureRecord, WorkerFailure, first_failure, worker_failures
from lockstep.launch.output import AllOutput, OutputForwarder
from lockstep.launch.rendezvous import Hosts


def record(at_ns: int, error: str = "ValueError: x") -> FailureRecord:
    return FailureRecord(at_ns=at_ns, error=error, traceback="")


@pytest.mark.parametrize(
    ("codes", "ended", "records", "first"),
    [
        # 1 raised, 0 lost its connection and raised too; 0's process was the first to end
        ({0: 1, 1: 1}, {0: 50, 1: 60}, {0: record(20), 1: record(10)}, 5),
        # 1 was killed, 0 raised because of it
        ({0: 1, 1: -9}, {0: 50, 1: 10}, {0: record(20)}, 5),
        # 0 raised, 1 was aborted because of it
        ({0: 1, 1: -6}, {0: 50, 1: 30}, {0: record(20)}, 4),
        # 1 failed, the launcher ended 0
        ({0: -15, 1: 3}, {1: 10}, {}, 5),
        # 0 ended well before 1 failed
        ({0: 0, 1: 3}, {0: 5, 1: 10}, {}, 5),
    ],
)
def test_the_first_in_time_is_the_cause(codes, ended, records, first: int):
    failure = first_failure(worker_failures(codes, ended, records, first_worker=4, attempt=0))
    assert failure.worker == first


def test_workers_that_the_launcher_ended_did_not_fail():
    assert worker_failures({0: -15, 1: -15}, {}, {}, first_worker=0, attempt=0) == []
    assert first_failure([]) is None


@pytest.mark.parametrize(
    ("code", "record_", "what", "shell"),
    [
        (1, record(0, "KeyError: 'x'"), "failed: KeyError: 'x'", 1),
        (-6, record(0, "KeyError: 'x'"), "failed: KeyError: 'x'", 1),
        (-9, None, "was killed by SIGKILL", 137),
        (-63, None, "was killed by signal 63", 191),
        (3, None, "ended with exit code 3", 3),
        (0, None, "ended before it returned", 1),
        (None, None, "ended with exit code None", 1),
    ],
)
def test_what_is_said_about_it(code: int | None, record_: FailureRecord | None, what: str, shell: int):
    failure = WorkerFailure(worker=0, attempt=0, exit_code=code, at_ns=0, record=record_)
    assert (failure.what, failure.shell_code) == (what, shell)


def test_workers_with_the_same_mistake_fail_at_one_place():
    trace = 'Traceback (most recent call last):\n  File "train.py", line {}, in <module>\nValueError: row {}\n'
    first, second, elsewhere = [
        FailureRecord(at_ns=0, error=f"ValueError: row {row}", traceback=trace.format(line, row))
        for line, row in ((3, 1), (3, 2), (4, 2))
    ]
    assert first.origin == second.origin != elsewhere.origin


@pytest.mark.parametrize(
    ("error", "said"),
    [("KeyError: 'x'", "failed with the KeyError above"), ("SystemExit: no data", "failed: SystemExit: no data")],
)
def test_below_its_traceback_the_message_is_not_repeated(error: str, said: str):
    failure = WorkerFailure(worker=0, attempt=0, exit_code=1, at_ns=0, record=record(0, error))
    assert failure.what_below_traceback == said


def raised() -> ValueError:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        return error


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "failure.json"
    written = FailureRecord.of(raised(), hide=())
    written.write(path)
    assert FailureRecord.read(path) == written
    assert written.error == "ValueError: two lines"
    assert written.traceback.startswith("Traceback (most recent call last):")
    assert [file.name for file in tmp_path.iterdir()] == ["failure.json"]


def test_frames_of_the_launcher_are_left_out():
    assert 'raise ValueError("two' in FailureRecord.of(raised(), hide=("elsewhere.py",)).traceback
    assert "in raised" in FailureRecord.of(raised(), hide=(__file__,)).traceback  # never an empty one


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"at_ns": 1}'])
def test_a_record_that_was_not_written_whole_is_none(text: str | None, tmp_path: Path):
    path = tmp_path / "failure.json"
    if text is not None:
        path.write_text(text)
    assert FailureRecord.read(path) is None


class StoppedAgent(Agent):
    """An agent whose launcher gets SIGTERM while it starts the workers."""

    def run(self, role: str = "") -> RunResult:
        raise SignalException("", signal.SIGTERM)


def test_a_signal_before_the_workers_had_started_is_no_success(tmp_path: Path):
    rendezvous = Hosts().meet(print)
    spec = WorkerSpec(role="worker", local_world_size=1, entrypoint="true", args=(), rdzv_handler=rendezvous)
    with closing(OutputForwarder(logs=tmp_path, sink=AllOutput())) as forwarder:
        agent = StoppedAgent(spec, WorkerSetup(forwarder, resources=({},), folder=tmp_path), limits=Limits())
        agent.run_to_end(rendezvous)

    assert agent.exit_code == 128 + signal.SIGTERM
