"""Real processes that a launcher has started, or that have its variables, train one model with one device's numbers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from tests import oracle
from tests.conftest import FreePorts
from tests.programs.launched import batches, make_module
from tests.tiers import partly_slow

pytestmark = pytest.mark.workers

PROGRAM = Path(__file__).parents[1] / "programs" / "launched.py"
LIMIT_S = 120
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # mpirun of Open MPI refuses root else
COMMANDS = {
    "Open MPI": ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n"],
    "MPICH": ["mpirun.mpich", "-n"],
}
KILLED = {"Open MPI": 137, "MPICH": 9}  # the exit codes of mpirun after SIGKILL to a process


def expected() -> list[float]:
    """The weights of a loop on one device."""
    module = make_module()
    oracle.train(module, batches(), partial(torch.optim.SGD, lr=0.1), torch.nn.functional.mse_loss, epochs=3)
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def check(lines: Sequence[str], workers: int) -> None:
    """Every process has trained the one model, and one of them is the chief."""
    found = sorted(json.loads(line) for line in lines)

    assert [(index, size, chief) for index, size, chief, _ in found] == [
        (index, workers, index == 0) for index in range(workers)
    ]
    assert all(weights == found[0][3] for *_, weights in found)
    assert found[0][3] == pytest.approx(expected(), rel=1e-5, abs=1e-6)


def launched(name: str, words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    command, *arguments = COMMANDS[name]
    if shutil.which(command) is None:
        pytest.skip(f"there is no {command}; apt-get install openmpi-bin mpich")
    environment = {**os.environ, **ROOT, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [command, *arguments, *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("name", partly_slow(COMMANDS, "MPICH"))
def test_mpirun_trains_one_model(name: str):
    script = f"{sys.executable} {PROGRAM}; exit $?"  # a shell stands between the launcher and the program
    words = ["2", sys.executable, str(PROGRAM)] if name == "Open MPI" else ["2", "sh", "-c", script]
    done = launched(name, words)
    assert done.returncode == 0, done.stderr
    check(done.stdout.splitlines(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_mpirun_with_a_strategy_for_one_process_fails(name: str):
    done = launched(name, ["2", sys.executable, str(PROGRAM), "one"])
    assert done.returncode != 0
    assert "MultiWorkerMirroredStrategy" in done.stderr
    assert "[" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_mpirun_of_one_process_is_one_process(name: str):
    check(launched(name, ["1", sys.executable, str(PROGRAM), "one"]).stdout.splitlines(), 1)


@pytest.mark.parametrize("name", partly_slow(COMMANDS, "MPICH"))
def test_a_killed_process_ends_the_job_which_goes_on_when_it_is_started_again(name: str, tmp_path: Path):
    program = [sys.executable, str(PROGRAM.with_name("restarted.py"))]
    for folder in ("killed", "undisturbed"):
        (tmp_path / folder).mkdir()
    killed, resumed = (launched(name, ["2", *program, str(tmp_path / "killed"), "3:1"]) for _ in range(2))
    undisturbed = launched(name, ["2", *program, str(tmp_path / "undisturbed")])
    assert (killed.returncode, resumed.returncode, undisturbed.returncode) == (KILLED[name], 0, 0), killed.stderr
    weights = [(tmp_path / folder / "weights.safetensors").read_bytes() for folder in ("killed", "undisturbed")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", partly_slow(COMMANDS, "Open MPI"))
def test_a_port_that_is_taken_ends_all_processes(name: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["2", sys.executable, str(PROGRAM)]
        done = launched(name, words, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode != 0
    assert f"cannot listen: port {port} of 127.0.0.1 is in use by another program" in done.stderr
    assert not done.stdout.startswith("[")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_address_of_no_host_ends_all_processes(name: str):
    words = ["2", sys.executable, str(PROGRAM)]
    done = launched(name, words, MASTER_ADDR="192.0.2.77", MASTER_PORT="29500")
    assert done.returncode != 0
    assert "cannot listen: 192.0.2.77 is not an address of this machine" in done.stderr


Environments = Callable[[FreePorts], list[dict[str, str]]]


def counted(workers: int, rank: str, **others: str) -> list[dict[str, str]]:
    return [{**others, rank: str(number)} for number in range(workers)]


def vertex(ports: FreePorts) -> list[dict[str, str]]:
    first, second = (f"127.0.0.1:{port}" for port in ports(2))
    pools = {"workerpool0": [first], "workerpool1": [second]}
    return [
        {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": kind, "index": 0}, "environment": "cloud"})}
        for kind in pools
    ]


def sagemaker(ports: FreePorts) -> list[dict[str, str]]:
    hosts = ["127.0.0.1", "127.0.0.2"]
    shared = {"SM_HOSTS": json.dumps(hosts), "MASTER_PORT": str(ports(1)[0])}
    return [{**shared, "SM_CURRENT_HOST": host} for host in hosts]


def kubeflow(ports: FreePorts) -> list[dict[str, str]]:
    shared = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(ports(1)[0]), "PET_NPROC_PER_NODE": "4"}
    return counted(2, "PET_NODE_RANK", PET_NNODES="2", **shared)


DESCRIPTIONS: dict[str, Environments] = {
    "Vertex AI": vertex,
    "SageMaker": sagemaker,
    "Kubeflow": kubeflow,
    "Indexed Job": lambda ports: counted(
        2, "JOB_COMPLETION_INDEX", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports(1)[0])
    ),
    "SkyPilot": lambda _: counted(
        2,
        "SKYPILOT_NODE_RANK",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2",
        SKYPILOT_TASK_ID=f"sky-{uuid4()}",
    ),
    "Azure's mpirun": lambda _: counted(
        2,
        "OMPI_COMM_WORLD_RANK",
        OMPI_COMM_WORLD_SIZE="2",
        AZ_BATCH_MASTER_NODE="127.0.0.1:6000",
        PMIX_NAMESPACE=str(uuid4()),
    ),
    "dstack": lambda _: counted(
        2,
        "DSTACK_NODE_RANK",
        DSTACK_NODES_NUM="2",
        DSTACK_MASTER_NODE_IP="127.0.0.1",
        DSTACK_NODES_IPS="127.0.0.1\n127.0.0.2",
        DSTACK_RUN_NAME=f"flowers-{uuid4()}",
    ),
    "Volcengine": lambda ports: counted(
        2, "MLP_ROLE_INDEX", MLP_WORKER_NUM="2", MLP_WORKER_0_HOST="127.0.0.1", MLP_WORKER_0_PORT=str(ports(1)[0])
    ),
    "Flux": lambda _: counted(3, "FLUX_TASK_RANK", FLUX_JOB_SIZE="3", FLUX_JOB_NNODES="1", FLUX_JOB_ID=f"f{uuid4()}"),
}


SLOW = ("Flux", "SkyPilot", "Azure's mpirun", "Vertex AI", "SageMaker")


@pytest.mark.parametrize("name", partly_slow(DESCRIPTIONS, *SLOW))
def test_processes_with_these_variables_train_one_model(python: Callable[..., Any], free_ports: FreePorts, name: str):
    programs = [python(str(PROGRAM), OMP_NUM_THREADS="1", **variables) for variables in DESCRIPTIONS[name](free_ports)]
    outcomes = [program.communicate(LIMIT_S) for program in programs]
    assert [program.returncode for program in programs] == [0] * len(programs), outcomes
    check([line for printed, _ in outcomes for line in printed.splitlines()], len(programs))


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), ("one",)], ids=["of several workers", "of one process"])
@pytest.mark.parametrize(
    "environments",
    [
        counted(2, "SLURM_PROCID", TF_CONFIG="{}", **STEP),
        counted(2, "SKYPILOT_NODE_RANK", TF_CONFIG="{}", SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS="127.0.0.1"),
        counted(2, "NODE_RANK", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"),
        counted(2, "JOB_COMPLETION_INDEX", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"),
    ],
    ids=["a step of SLURM", "SkyPilot", "Lightning's variables", "an Indexed Job without a port"],
)
def test_no_process_trains_alone(
    python: Callable[..., Any], environments: list[dict[str, str]], strategy: tuple[str, ...]
):
    programs = [python(str(PROGRAM), *strategy, OMP_NUM_THREADS="1", **variables) for variables in environments]
    outcomes = [program.communicate(LIMIT_S) for program in programs]
    assert all(program.returncode for program in programs)
    assert all(not printed and "set RANK=0 WORLD_SIZE=1" in error for printed, error in outcomes), outcomes
