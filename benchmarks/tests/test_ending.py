"""The processes of a trial, and what they have started, end with the benchmark, without being asked to."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.workers

LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
# Some frameworks' launchers start their processes in sessions of their own.
PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(PEERS)!r})
from program import take_job

if not os.fork():
    os.setsid()
take_job()
open(os.environ["PIPE"], "a").write(f"{{os.getpid()}}\\n")
signal.pause()
"""
BENCH = """
import os, signal, sys
from pathlib import Path
from benchmarks.harness import run_trial
from benchmarks.programs import Program
from benchmarks.processes import SpawnedBody
from benchmarks.trial import Contender, Trial
from benchmarks.workloads import WORKLOADS

def stuck(trial, process, timer):
    os.fork()
    open(os.environ["PIPE"], "a").write(f"{os.getpid()}\\n")
    signal.pause()

if __name__ == "__main__":
    program = Program(python=Path(sys.executable), script=Path("program.py"))
    spawned = SpawnedBody(body=stuck, preloaded="benchmarks.trial" if sys.argv[1] == "forked" else "")
    launcher = program if sys.argv[1] == "program" else spawned
    contender = Contender(name="stuck-1", settings="", launcher=launcher, replicas=1)
    run_trial(Trial(workload=WORKLOADS["linear"], contender=contender, warm_up=1, steps=1, cores=1))
"""


def two_numbers(pipe: int) -> list[int]:
    """What two processes say, a line each."""
    text = b""
    while text.count(b"\n") < 2:
        assert select.select([pipe], [], [], LIMIT_S)[0], f"only {text!r} was said within {LIMIT_S:g} s"
        text += os.read(pipe, 100)
    return [int(line) for line in text.split()]


@pytest.mark.parametrize("launcher", ["spawned", "forked", "program"])
def test_the_processes_of_a_trial_end_with_the_benchmark(launcher: str, tmp_path: Path):
    (tmp_path / "bench.py").write_text(BENCH)
    (tmp_path / "program.py").write_text(PROGRAM)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    variables = {**os.environ, "PIPE": str(tmp_path / "pipe"), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    with subprocess.Popen([sys.executable, "bench.py", launcher], cwd=tmp_path, env=variables) as bench:
        try:
            handles = [os.pidfd_open(pid) for pid in two_numbers(pipe)]
        finally:
            bench.send_signal(signal.SIGKILL)  # also if they say nothing: leaving the block waits for the process
        ended = [bool(select.select([handle], [], [], LIMIT_S)[0]) for handle in handles]

    for handle in [*handles, pipe]:
        os.close(handle)
    assert ended == [True, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    asked = ["cpu", "--workload", "linear", "--only", "lockstep-2", "--rounds", "1000", "--output", "tables"]
    # torch keeps a folder of its own there, for good.
    folders = {"TMPDIR": str(own), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks", *asked]
    variables = {**os.environ, **folders}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stderr is not None
            first = bench.stderr.readline()
            bench.send_signal(number)
            _, said = bench.communicate(timeout=LIMIT_S)
        finally:
            bench.kill()

    assert "linear" in first
    assert (bench.returncode, "interrupted" in said) == (130, True), said
    assert list(own.iterdir()) == []
    assert not (tmp_path / "tables").exists()
