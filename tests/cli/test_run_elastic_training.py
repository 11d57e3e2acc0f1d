"""Trainings of four replicas that lose workers, or move to another number of processes, end with the very same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.elastic_campaign import PROGRAM, STEP, Run, train

pytestmark = [pytest.mark.workers, pytest.mark.slow]

STEPS = 80
LIMIT_S = 120
SAVED_AND_STOPPED = 75


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker, without a loss."""
    return train(tmp_path_factory.mktemp("undisturbed"), steps=STEPS, workers="1", kills=0, seed=0)


@pytest.mark.timeout(400)
def test_random_kills_of_up_to_three_of_four_workers_change_no_bit(undisturbed: Run, tmp_path: Path):
    run = train(tmp_path, steps=STEPS, workers="1:4", kills=3, seed=1)

    assert undisturbed.fingerprint
    assert (run.exit_code, run.fingerprint) == (0, undisturbed.fingerprint), run.said
    assert run.killed
    assert any("SIGKILL" in line for line in run.said)


def go_on(folder: Path, words: Sequence[str], *, until: int | None) -> tuple[int, list[str]]:
    """Goes on with the training until SIGTERM after a step, or to the end; exit code and what was printed."""
    process = subprocess.Popen([sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    with process.stdout:
        for line in process.stdout:
            lines.append(line)
            if until is not None and (step := STEP.match(line)) and int(step[1]) >= until:
                process.terminate()
                until = None
    return process.wait(LIMIT_S), lines


@pytest.mark.timeout(400)
def test_a_job_one_process_and_another_job_take_turns(undisturbed: Run, tmp_path: Path):
    program = [str(PROGRAM), str(STEPS), "backup"]
    run = ["-m", "lockstep_tools.cli", "run", "--workers"]

    job, _ = go_on(tmp_path, [*run, "1:4", *program], until=15)
    alone, lines = go_on(tmp_path, [*program, "alone"], until=45)
    code, end = go_on(tmp_path, [*run, "1:3", *program], until=None)

    assert (job, alone, code) == (SAVED_AND_STOPPED, SAVED_AND_STOPPED, 0)
    assert min(int(step[1]) for step in map(STEP.match, lines) if step) > 10
    assert end[-1].split() == ["fingerprint", undisturbed.fingerprint]
