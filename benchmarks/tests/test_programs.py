"""Real programs in processes of their own, run by this Python: small, but with the whole protocol."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import run_trial
from benchmarks.programs import Program, record_of
from benchmarks.trial import Contender, Trial
from benchmarks.workloads import WORKLOADS
from lockstep.errors import ReplicaError

PEERS = Path(__file__).parents[1] / "peers"
WHOLE = """
import os, subprocess, sys
sys.path.insert(0, {peers!r})
from program import load_batches, start_timer, take_job

job = take_job()
if job.replicas > 1 and "RANK" not in os.environ:
    subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {{"RANK": "1"}})
batches = load_batches(job)
timer = start_timer(job, trained=11)
for index in range(timer.total):
    timer.record_step(float(batches[index % len(batches)]["y"].mean()))
"""


@pytest.fixture
def make_trial(tmp_path: Path):
    def make(text: str, *, processes: int = 1, **changes: object) -> Trial:
        script = tmp_path / "train.py"
        script.write_text(text.format(peers=str(PEERS)))
        program = Program(python=Path(sys.executable), script=script, **changes)  # type: ignore[arg-type]
        contender = Contender(
            name="tiny-1", settings="", launcher=program, replicas=processes, processes=processes, role="peer"
        )
        return Trial(workload=WORKLOADS["linear"], contender=contender, warm_up=1, steps=5, cores=2)

    return make


@pytest.mark.workers
def test_a_program_trains_on_the_batches_of_the_workload(make_trial):
    sample = run_trial(make_trial(WHOLE))

    # Four different batches come in turn, so the sixth step has the second.
    expected = float(WORKLOADS["linear"].make_batches(2)[1][1].float().mean())
    assert sample.loss == pytest.approx(expected)
    assert (len(sample.step_ms), sample.trained) == (5, 11)
    assert sample.first_step_s > 0.05
    assert 5 < sample.memory.pss_mb <= sample.memory.peak_mb * 1.01


@pytest.mark.workers
def test_every_process_that_a_program_starts_is_measured(make_trial):
    one = run_trial(make_trial(WHOLE))
    two = run_trial(make_trial(WHOLE, processes=2))

    assert two.memory.pss_mb > 1.5 * one.memory.pss_mb


@pytest.mark.workers
def test_a_program_is_given_its_arguments_and_variables_and_the_package(make_trial):
    said = "import lockstep; raise RuntimeError(sys.flags.dev_mode, os.environ['A'], lockstep.__file__)"
    text = WHOLE.replace("job = take_job()", said)

    with pytest.raises(
        ReplicaError, match=r"RuntimeError: \(True, 'b', '.*/lockstep-bench-\w+/lockstep/__init__.py'\)"
    ):
        run_trial(make_trial(text, arguments=("-X", "dev"), variables={"A": "b"}))


@pytest.mark.workers
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('no such layer')", "ValueError: no such layer"),
        ("print('halfway')", "halfway"),
        ("", "it printed nothing"),
        (
            WHOLE.replace("for index", "timer.__dict__.clear()\nfor index"),
            "AttributeError: 'StepTimer' object has no attribute 'total'",
        ),
    ],
)
def test_the_last_error_of_a_program_that_fails_is_the_reason(make_trial, text: str, reason: str):
    with pytest.raises(
        ReplicaError, match=f"contender 'tiny-1' on workload 'linear' ended before its last step: {reason}"
    ):
        run_trial(make_trial(text))


@pytest.mark.workers
def test_a_program_that_hangs_is_ended_with_all_its_processes(make_trial, tmp_path: Path):
    pids = tmp_path / "pids"
    hang = f"\nopen({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')\nimport threading; threading.Event().wait()\n"
    text = WHOLE.replace("for index", hang.replace("{", "{{").replace("}", "}}") + "for index")

    trial = make_trial(text, processes=2)
    with pytest.raises(ReplicaError, match="was not done after 6 s"):
        run_trial(replace(trial, contender=replace(trial.contender, limit_s=6.0)))

    numbers = [int(pid) for pid in pids.read_text().split()]
    assert len(numbers) == 2
    assert not any(is_running(pid) for pid in numbers)


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie that waits for a parent of its own."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interpreter_that_is_not_there_is_a_reason(make_trial, tmp_path: Path):
    trial = make_trial(WHOLE)
    program = replace(trial.contender.launcher, python=tmp_path / "bin" / "python")

    with pytest.raises(ReplicaError, match=r"bin/python.: No such file or directory"):
        run_trial(replace(trial, contender=replace(trial.contender, launcher=program)))


def test_a_line_that_is_no_record_is_refused():
    with pytest.raises(ReplicaError, match="expected JSON as"):
        record_of(b"hello\n")
    with pytest.raises(ReplicaError, match="expected JSON as"):
        record_of(b'{"step_s": [], "exchange_s": []}\n')


def test_our_environment_is_not_changed(make_trial):
    before = dict(os.environ)
    with pytest.raises(ReplicaError):
        run_trial(make_trial("", variables={"A": "b"}))

    assert dict(os.environ) == before
