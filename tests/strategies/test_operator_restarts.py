"""Workers that an operator of Kubernetes restarts one by one: each ends with a code that it takes for transient.

The operator of these tests behaves as Kubeflow's with ``restartPolicy: ExitCode`` does: a process that was killed, or
ended with a code from 128 up, is started again with the same variables; any other code ends the job.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import FreePorts

from lockstep.checkpoint.weights import read_weights
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = pytest.mark.workers

PROGRAM = Path(__file__).parents[1] / "programs" / "restarted.py"
LIMIT_S = 120
Python = Callable[..., Any]


class Operator:
    """Starts the workers of a job, and each of them again as long as its code is one of a transient failure."""

    def __init__(self, python: Python, port: int, folder: Path, size: int) -> None:
        self._python, self._port, self._folder, self._size = python, port, folder, size
        self.codes: dict[int, list[int]] = {rank: [] for rank in range(size)}
        self.said = ""

    def run(self, *deaths: str) -> None:
        """Runs the job to its end; ``deaths`` say after which batch which worker is killed: "3:1"."""
        threads = [threading.Thread(target=self._look_after, args=(rank, deaths)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), (self.codes, self.said)

    def start(self, rank: int, deaths: Sequence[str] = ()) -> Any:
        variables = {"RANK": f"{rank}", "WORLD_SIZE": f"{self._size}", "MASTER_ADDR": "127.0.0.1"}
        words = (str(PROGRAM), str(self._folder), *deaths)
        return self._python(*words, OMP_NUM_THREADS="1", MASTER_PORT=f"{self._port}", **variables)

    def _look_after(self, rank: int, deaths: Sequence[str]) -> None:
        while True:
            program = self.start(rank, deaths)
            _, said = program.communicate(timeout=LIMIT_S)
            self.said += said
            code = program.returncode if program.returncode >= 0 else 128 - program.returncode
            self.codes[rank].append(code)
            if code < 128:
                return


@pytest.fixture
def operator(python: Python, free_ports: FreePorts, tmp_path: Path) -> Callable[[str], Operator]:
    """``operator("job")``: a job of three workers in a folder of that name."""

    def make(name: str) -> Operator:
        folder = tmp_path / name
        folder.mkdir()
        return Operator(python, free_ports(1)[0], folder, 3)

    return make


def test_workers_that_are_killed_and_restarted_one_by_one_end_with_the_same_bits(
    operator: Callable[[str], Operator], tmp_path: Path
):
    undisturbed, disturbed = operator("undisturbed"), operator("disturbed")
    undisturbed.run()
    disturbed.run("3:1", "6:0")
    killed, survived = 128 + signal.SIGKILL, EXIT_OF_SURVIVOR
    assert undisturbed.codes == {rank: [0] for rank in range(3)}, undisturbed.said
    assert disturbed.codes == {0: [survived, killed, 0], 1: [killed, survived, 0], 2: [survived, survived, 0]}
    first, second = (read_weights(tmp_path / name / "weights.safetensors") for name in ("undisturbed", "disturbed"))
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.slow
def test_a_worker_that_is_told_twice_ends_and_disturbs_nobody(operator: Callable[[str], Operator]):
    job = operator("job")
    twin = job.start(1)
    job.run()
    _, said = twin.communicate(timeout=LIMIT_S)
    # Whichever of the two came second is refused.
    assert sorted([twin.returncode, *job.codes[1]]) == [0, 1], said + job.said
    assert "worker 1 is there already: process" in said + job.said
