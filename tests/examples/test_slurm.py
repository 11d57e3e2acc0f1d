"""The SLURM script: bash and sbatch can read it, and the command that it comes to is one of ours."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lockstep.cluster.slurm import step_port
from lockstep.train.callbacks.checkpoints import SAVED_AND_STOPPED
from lockstep_tools.cli.app import parse

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
LINES = SCRIPT.read_text().splitlines()

# Of `sbatch --help` (SLURM 22.05): the option, and what its value looks like; None for an option without one.
OPTIONS: dict[str, str | None] = {
    "job-name": r"\w+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "output": r"\S+",
    "signal": r"([BR]:)?(TERM|USR1|USR2|INT)(@\d+)?",
    "requeue": None,
    "open-mode": "append|truncate",
}


def directives() -> dict[str, str | None]:
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in LINES if line.startswith("#SBATCH")]
    assert None not in found, "a #SBATCH line that is no option"
    return {match[1]: match[2] for match in found if match is not None}


def test_bash_can_read_it():
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert LINES[0] == "#!/bin/bash"


def test_sbatch_can_read_it():
    wrong = [
        name
        for name, value in directives().items()
        if name not in OPTIONS
        or (value is None) != (OPTIONS[name] is None)
        or not re.fullmatch(OPTIONS[name] or "", value or "")
    ]

    assert wrong == []
    assert directives()["ntasks-per-node"] == "1"  # one launcher a host


def test_sbatch_reads_every_directive():
    """It stops at the first line that is a command."""
    first_command = next(index for index, line in enumerate(LINES) if line and not line.startswith("#"))
    assert [line for line in LINES[first_command:] if line.startswith("#SBATCH")] == []


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, where ``srun`` writes down what it should run, in place of running it."""
    stubs = {
        "scontrol": f'#!/bin/bash\n[ "$2" = hostnames ] && printf "node07\\nnode08\\n"\necho "$*" >> {tmp_path}/told\n',
        "srun": f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/asked\nexit "${{STATUS:-0}}"\n',
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }


def submit(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


def test_the_command_is_one_of_ours(slurm: dict[str, str], tmp_path: Path):
    done = submit(slurm, "train.py", "--epochs", "5", "a word")
    asked = (tmp_path / "asked").read_text().splitlines()
    srun, (shell, *words) = asked[: asked.index("bash")], asked[asked.index("bash") :]

    assert (done.returncode, done.stderr) == (0, "")
    assert srun == ["--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    shown = [words[0], words[1].replace("exec lockstep", 'printf "%s\\n"'), *words[2:]]
    environment = {**slurm, "SLURM_NODEID": "1"}
    task = subprocess.run([shell, *shown], env=environment, capture_output=True, text=True, check=True)
    command, *rest = task.stdout.splitlines()
    assert command == "run"
    assert rest == [
        *("--index", "1", "--workers", "4", "--nodes", "2", "--hosts", f"node07:{step_port(4711, 0)}"),
        *("--job", "slurm-4711", "--max-restarts", "3", "--stop-s", "100"),
        *("train.py", "--epochs", "5", "a word"),
    ]
    assert callable(parse([command, *rest]))  # it can be run, and was not
    assert (tmp_path / "told").read_text() == "show hostnames node[07-08]\n"


@pytest.mark.parametrize(("status", "goes_on"), [(SAVED_AND_STOPPED, True), (1, False)])
def test_a_job_that_has_saved_goes_back_into_the_queue(
    slurm: dict[str, str], tmp_path: Path, status: int, goes_on: bool
):
    done = submit({**slurm, "STATUS": str(status)}, "train.py")
    assert done.returncode == status
    assert ((tmp_path / "told").read_text().splitlines()[-1] == "requeue 4711") is goes_on


def test_the_number_of_workers_can_be_given_and_is_one_where_there_are_no_gpus(slurm: dict[str, str], tmp_path: Path):
    del slurm["SLURM_GPUS_ON_NODE"]
    for given, workers in (({}, "1"), ({"WORKERS_PER_NODE": "6"}, "6")):
        submit({**slurm, **given}, "train.py")
        asked = (tmp_path / "asked").read_text().splitlines()
        assert asked[asked.index("--workers") + 1] == workers


def test_without_a_program_it_says_how_to_use_it(slurm: dict[str, str], tmp_path: Path):
    done = submit(slurm)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch ")
    assert not (tmp_path / "asked").exists()
