"""Trainings of four replicas that lose workers, or move to another number of processes, end with the very same bits."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Start
from tests.conftest import Program
from tests.elastic_campaign import PROGRAM, STEP, train

pytestmark = [pytest.mark.workers, pytest.mark.slow]

STEPS = 80
LIMIT_S = 120
SAVED_AND_STOPPED = 75


@pytest.fixture(scope="module")
def undisturbed(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one process that trains without a loss."""
    words = [str(PROGRAM), str(STEPS), "backup", "alone"]
    with closing(Program(forks, words, tmp_path_factory.mktemp("undisturbed"), os.environ)) as process:
        _, lines = go_on(process, until=None)
    return lines[-1].split()[1]


def test_random_kills_of_up_to_three_of_four_workers_change_no_bit(python: Start, undisturbed: str, tmp_path: Path):
    run = train(tmp_path, steps=STEPS, workers="1:4", kills=3, seed=1, start=partial(python, forks_workers=True))
    assert (run.exit_code, run.fingerprint) == (0, undisturbed), run.said
    assert run.killed
    assert any("SIGKILL" in line for line in run.said)


def test_a_job_one_process_and_another_job_take_turns(python: Start, undisturbed: str):
    program = [str(PROGRAM), str(STEPS), "backup"]
    run = ["-m", "lockstep_tools.cli", "run", "--workers"]
    job, _ = go_on(python(*run, "1:4", *program, forks_workers=True), until=15)
    alone, lines = go_on(python(*program, "alone"), until=45)
    code, end = go_on(python(*run, "1:3", *program, forks_workers=True), until=None)
    assert (job, alone, code) == (SAVED_AND_STOPPED, SAVED_AND_STOPPED, 0)
    assert min(int(step[1]) for step in map(STEP.match, lines) if step) > 10
    assert end[-1].split() == ["fingerprint", undisturbed]


def go_on(process: Any, *, until: int | None) -> tuple[int, list[str]]:
    """Lets a training go on until SIGTERM after a step, or to the end; exit code and what was printed."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if until is not None and (step := STEP.match(line)) and int(step[1]) >= until:
            process.terminate()
            until = None
    return process.wait(LIMIT_S), lines
