from __future__ import annotations

import subprocess
import sys
import time

import pytest

import benchmarks.step_timer as timer_module
from benchmarks.step_timer import StepRecord, StepTimer


@pytest.fixture
def records() -> list[StepRecord]:
    return []


def test_the_record_comes_with_the_last_lap_and_holds_the_timed_steps_only(records):
    timer = StepTimer(warm_up=2, steps=3, started_s=time.monotonic(), report=records.append)
    for loss in range(4):
        timer.record_step(float(loss), exchange_s=loss / 10)
    assert (timer.total, records) == (5, [])

    timer.record_step(4.0, exchange_s=0.4)

    (record,) = records
    assert len(record.step_s) == 3
    assert all(step > 0 for step in record.step_s)
    assert record.exchange_s == (0.2, 0.3, 0.4)
    assert record.loss == 4.0


def test_the_first_step_counts_from_the_start_of_the_trial(records):
    started_s = time.monotonic() - 100
    timer = StepTimer(warm_up=1, steps=1, started_s=started_s, report=records.append)
    timer.record_step(0.0)
    timer.record_step(0.0)

    assert 100 <= records[0].first_step_s <= time.monotonic() - started_s


def test_the_cpu_time_of_the_first_step_counts_the_launcher_that_was_named(records):
    program = "sum(range(10**7)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        launcher.stdout.readline()
        for pid in (None, launcher.pid):
            timer = StepTimer(warm_up=1, steps=1, started_s=time.monotonic(), report=records.append)
            timer.launcher = pid
            timer.record_step(0.0)
            timer.record_step(0.0)
        launcher.communicate(b"\n")

    alone, both = (record.first_step_cpu_s for record in records)
    assert 0 < alone <= time.process_time()
    assert both > alone + 0.05


def test_cpu_time_counts_the_timed_steps_only(records):
    timer = StepTimer(warm_up=1, steps=1, started_s=time.monotonic(), report=records.append)
    _work(0.2)
    timer.record_step(0.0)
    _work(0.05)
    timer.record_step(0.0)

    assert 0.04 <= records[0].cpu_s < 0.2


def test_the_device_is_waited_for_at_the_ends_of_laps_only(records):
    timer = StepTimer(warm_up=2, steps=4, started_s=time.monotonic(), report=records.append, lap=2)
    waits: list[int] = []
    read: list[int] = []
    begun: list[int] = []
    timer.synchronize = lambda: waits.append(begun[-1])
    timer.extra, timer.trained = lambda: {"step": begun[-1]}, 7
    for step in range(1, timer.total + 1):
        begun.append(step)
        timer.record_step(lambda: read.append(begun[-1]) or 1.5)

    assert (waits, read) == ([2, 4, 6], [6])
    assert (len(records[0].step_s), records[0].loss, records[0].exchange_s) == (2, 1.5, ())
    assert (records[0].extra, records[0].trained) == ({"step": 6}, 7)


def test_the_step_timer_needs_python_alone():
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print({'torch', 'lockstep', 'numpy'} & sys.modules.keys())"
    command = [sys.executable, "-I", "-S", "-c", code, timer_module.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def _work(cpu_s: float) -> None:
    limit = time.process_time() + cpu_s
    while time.process_time() < limit:
        pass
