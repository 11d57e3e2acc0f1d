"""Descriptions of MPI launchers and hosted services: followed where they are whole, else refused with what to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.cluster.environment import cluster_from_environment, declared_job
from lockstep.cluster.launcher_variables import INTERFACES, LAUNCHERS, SERVICES, Launcher
from lockstep.cluster.local import LocalRank, find_local_rank
from lockstep.config import DeviceRegistry
from lockstep.errors import ClusterError, UsageError
from lockstep.strategies.mirrored import MirroredStrategy

Environment = dict[str, str]
TABLE = (*LAUNCHERS, *SERVICES, *INTERFACES)
NUMBERED = [row for row in TABLE if row.size]
WHERE = {"MASTER_ADDR": "hosta", "MASTER_PORT": "29500"}


def named(name: str) -> Launcher:
    return next(row for row in TABLE if row.name == name)


def numbered(row: Launcher, rank: int, size: int, local_size: int = 1) -> Environment:
    """What a launcher sets in one of its processes, ``local_size`` of them on each host."""
    variables = {row.rank: str(rank), row.size: str(size), row.local_rank: str(rank % local_size)}
    variables |= {row.local_size: str(local_size), row.hosts: str(-(-size // local_size))}
    variables |= {name: variables.get(name, "1") for name in row.signs} | dict.fromkeys(row.job, "an-id")
    variables.pop("", None)
    return variables


MPI_HOST = numbered(named("Open MPI"), 1, 2, 2)
MPI_HOSTS = numbered(named("Open MPI"), 3, 4, 2)
VERTEX = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"], "workerpool2": ["d:2222"]}


def cluster_spec(kind: str, index: int, **pools: list[str]) -> Environment:
    text = json.dumps({"cluster": pools or VERTEX, "task": {"type": kind, "index": index}, "environment": "cloud"})
    return {"CLUSTER_SPEC": text}


SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-2026-01-01_flowers-1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "flowers-17"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "flowers-node-0-0.flowers",
    "PET_MASTER_PORT": "29400",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
    "DSTACK_RUN_NAME": "flowers-17",
}
BEAKER = {
    "BEAKER_REPLICA_RANK": "1",
    "BEAKER_REPLICA_COUNT": "2",
    "BEAKER_LEADER_REPLICA_HOSTNAME": "hosta.org",
    "BEAKER_WORKLOAD_ID": "01JWJ96J",
}
VOLCENGINE = {
    "MLP_ROLE_INDEX": "1",
    "MLP_WORKER_NUM": "2",
    "MLP_WORKER_0_HOST": "10.0.0.1",
    "MLP_WORKER_0_PORT": "2222",
}
METAFLOW = {"MF_PARALLEL_NODE_INDEX": "1", "MF_PARALLEL_NUM_NODES": "2", "MF_PARALLEL_MAIN_IP": "10.0.0.1"}
LIGHTNING = {"NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
VOLCANO = {"VC_WORKER_HOSTS": "flowers-worker-0.flowers,flowers-worker-1.flowers", "VC_TASK_INDEX": "1"}
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}

FOLLOWED: dict[str, tuple[Environment, tuple[str, int, int, str, int | None]]] = {
    "mpirun on one host": (MPI_HOST, ("Open MPI", 1, 2, "127.0.0.1", None)),
    "mpirun on two hosts": ({**MPI_HOSTS, **WHERE}, ("Open MPI", 3, 4, "hosta", 29500)),
    "mpirun with a host": ({**MPI_HOSTS, "MASTER_ADDR": "hosta"}, ("Open MPI", 3, 4, "hosta", None)),
    "Azure's mpirun": ({**MPI_HOSTS, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, ("Open MPI", 3, 4, "10.0.0.4", None)),
    "SageMaker's mpirun": ({**MPI_HOSTS, **SAGEMAKER, **WHERE}, ("Open MPI", 3, 4, "hosta", 29500)),
    "mpirun in a step of SLURM": ({**SLURM_STEP, **MPI_HOST}, ("Open MPI", 1, 2, "127.0.0.1", None)),
    "mpirun with what a script exported": ({**MPI_HOST, "WORLD_SIZE": "2"}, ("Open MPI", 1, 2, "127.0.0.1", None)),
    "torchrun below mpirun": (
        {**MPI_HOSTS, "RANK": "5", "WORLD_SIZE": "8", **WHERE},
        ("torchrun", 5, 8, "hosta", 29500),
    ),
    "jsrun": ({**numbered(named("jsrun"), 1, 2, 2), **MPI_HOST}, ("jsrun", 1, 2, "127.0.0.1", None)),
    "SLURM's PMIx": ({**SLURM_STEP, "PMIX_RANK": "1", "PMI_RANK": "1"}, ("SLURM", 1, 2, "n1", None)),
    "Flux on one host": (numbered(named("Flux"), 1, 2, 2), ("Flux", 1, 2, "127.0.0.1", None)),
    "Kubeflow": (KUBEFLOW, ("Kubeflow Trainer", 1, 2, "flowers-node-0-0.flowers", 29400)),
    "SkyPilot": (SKYPILOT, ("SkyPilot", 1, 2, "10.0.0.4", None)),
    "SkyPilot in steps of one task": (
        {**SKYPILOT, **SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        ("SkyPilot", 1, 2, "10.0.0.4", None),
    ),
    "dstack": (DSTACK, ("dstack", 1, 2, "10.0.0.1", None)),
    "Beaker": (BEAKER, ("Beaker", 1, 2, "hosta.org", None)),
    "Volcengine": (VOLCENGINE, ("Volcengine's ML platform", 1, 2, "10.0.0.1", 2222)),
    "Metaflow": ({**METAFLOW, "MASTER_PORT": "29500"}, ("Metaflow", 1, 2, "10.0.0.1", 29500)),
    "Platform MPI": (numbered(named("Platform MPI"), 1, 2, 2), ("Platform MPI", 1, 2, "127.0.0.1", None)),
    "SLURM's plugin for MVAPICH 1": (
        {**SLURM_STEP, "MPIRUN_RANK": "1", "MPIRUN_NPROCS": "2"},
        ("SLURM", 1, 2, "n1", None),
    ),
    "AWS Batch": ({**numbered(named("AWS Batch"), 1, 2), **WHERE}, ("AWS Batch", 1, 2, "hosta", 29500)),
    "SageMaker": (SAGEMAKER, ("SageMaker", 1, 2, "algo-1", None)),
    "SageMaker with a port": ({**SAGEMAKER, "MASTER_PORT": "7777"}, ("SageMaker", 1, 2, "algo-1", 7777)),
    "Volcano": (VOLCANO, ("Volcano", 1, 2, "flowers-worker-0.flowers", None)),
    "Vertex AI's primary": (cluster_spec("workerpool0", 0), ("CLUSTER_SPEC", 0, 3, "a", 2222)),
    "Vertex AI's worker": (cluster_spec("workerpool1", 1), ("CLUSTER_SPEC", 2, 3, "a", 2222)),
}
ALONE: dict[str, Environment] = {
    **{row.name: numbered(row, 0, 1) for row in NUMBERED},
    "SageMaker": {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    "Vertex AI": cluster_spec("workerpool0", 0, workerpool0=["a:2222"]),
    "Volcano": {"VC_WORKER_HOSTS": "flowers-worker-0.flowers", "VC_TASK_INDEX": "0"},
    "Azure's single node": {**numbered(named("Open MPI"), 0, 1), "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
}
PBSDSH = {"PBS_JOBID": "7.server", "PBS_NODENUM": "1", "PBS_TASKNUM": "1", "PBS_NODEFILE": "/var/spool/pbs/aux/7"}
REFUSED: dict[str, tuple[Environment, str]] = {
    **{
        f"{row.name} on several hosts": (numbered(row, 3, 4, 2), re.escape(row.line))
        for row in NUMBERED
        if row.chief == ("MASTER_ADDR",) or row.name == "Open MPI"
    },
    **{f"{row.name} without a size": ({row.rank: "1"}, re.escape(row.line)) for row in TABLE if not row.size},
    "PALS without a size": ({"PALS_RANKID": "1", "PALS_APID": "an-id"}, r"sh -c 'RANK=\$PALS_RANKID WORLD_SIZE=4"),
    "Hydra without a port": ({**numbered(LAUNCHERS[-1], 3, 4, 2), "MASTER_ADDR": "hosta"}, "-genv MASTER_PORT 29500"),
    "Kubeflow, elastic": (
        {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "hosta:29400"},
        r"elastic job.*torchrun train\.py",
    ),
    "Lightning's variables of a host": (LIGHTNING, r"export RANK=\$NODE_RANK WORLD_SIZE=2 MASTER_ADDR=hosta"),
    "Beaker without a leader": ({**BEAKER, "BEAKER_LEADER_REPLICA_HOSTNAME": ""}, "export MASTER_ADDR="),
    "Metaflow without a port": (METAFLOW, re.escape(named("Metaflow").line)),
    "a heterogeneous step of SLURM": ({**SLURM_STEP, "SLURM_PROCID": "3"}, "heterogeneous jobs are not supported"),
    "Kubeflow without a rank": ({"PET_NNODES": "2"}, r"PET_NODE_RANK not set .*torchrun train\.py"),
    "SkyPilot without hosts": ({**SKYPILOT, "SKYPILOT_NODE_IPS": ""}, "export MASTER_ADDR="),
    "SageMaker of another host": ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "none of SM_HOSTS"),
    "SageMaker without this host": ({"SM_HOSTS": '["a", "b"]'}, "SM_CURRENT_HOST not set"),
    "SageMaker without a list": ({"SM_HOSTS": "algo-1,algo-2", "SM_CURRENT_HOST": "algo-1"}, "is not a list of hosts"),
    "Volcano of two groups": ({**VOLCANO, "VC_MASTER_HOSTS": "m"}, r"pytorch: \[\]"),
    "another CLUSTER_SPEC": ({"CLUSTER_SPEC": '{"worker": ["a:1", "b:1"]}'}, "TF_CONFIG='"),
    "half a CLUSTER_SPEC": ({"CLUSTER_SPEC": '{"cluster": '}, "is not Vertex AI's"),
    "Vertex AI's parameter server": (cluster_spec("workerpool2", 0), "parameter server"),
    "Vertex AI's worker of none": (cluster_spec("workerpool1", 2), "is not Vertex AI's"),
    "pbsdsh": (PBSDSH, r"RANK=\$PBS_NODENUM WORLD_SIZE=4 MASTER_ADDR=hosta MASTER_PORT=29500"),
    "a second task of pbsdsh": ({**PBSDSH, "PBS_NODENUM": "0", "PBS_TASKNUM": "2"}, "pbsdsh -- sh -c"),
    "two services": ({**SKYPILOT, **SAGEMAKER, "SM_HOSTS": '["a", "b", "algo-2"]'}, "SkyPilot declares worker 1 of 2"),
    "a rank beyond the size": ({**MPI_HOST, "OMPI_COMM_WORLD_RANK": "2"}, "a whole number from 0 to 1"),
}
# Variables of an allocation, or of one of many programs: they say nothing of processes that train one model.
LISTS: dict[str, Environment] = {
    "LSF": {"LSB_JOBID": "7", "LSB_HOSTS": "a a b", "LSB_MCPU_HOSTS": "a 2 b 1", "LSB_DJOB_NUMPROC": "3"},
    "PBS": {**PBSDSH, "PBS_NODENUM": "0"},
    "SLURM's batch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-8]"},
    "Grid Engine": {"JOB_ID": "7", "NSLOTS": "8", "PE_HOSTFILE": "/var/spool/hosts"},
    "Azure Batch": {"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
    "a child of a program that uses MPI by itself": {"PMIX_RANK": "0", "OMPI_MCA_ess": "singleton"},
    "an indexed Job of Kubernetes": {"JOB_COMPLETION_INDEX": "3"},
    "an array": {"SLURM_ARRAY_TASK_ID": "3", "AWS_BATCH_JOB_ARRAY_INDEX": "3", "LSB_JOBINDEX": "3", "SGE_TASK_ID": "3"},
    "another program's CLUSTER_SPEC": {"CLUSTER_SPEC": "gpu-small"},
    "a task of Volcano that lists nobody": {"VC_TASK_INDEX": "1"},
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_whole_description_is_followed(name: str):
    environment, (source, index, workers, host, port) = FOLLOWED[name]
    cluster = cluster_from_environment(environment)
    assert (cluster.source, cluster.index, cluster.num_workers) == (source, index, workers)
    assert cluster.chief_address[0] == host
    assert port is None or cluster.chief_address[1] == port
    assert declared_job(environment) == cluster


@pytest.mark.parametrize(
    "name", ["mpirun on one host", "Flux on one host", "SkyPilot", "SageMaker", "Volcano", "jsrun"]
)
def test_all_processes_derive_one_address_and_one_id(name: str):
    environment, (source, *_) = FOLLOWED[name]
    rank = next((row.rank for row in TABLE if row.name == source), "VC_TASK_INDEX")
    first = (
        {**environment, rank: "0", "SM_CURRENT_HOST": "algo-1"}
        if "SM_HOSTS" in environment
        else {**environment, rank: "0"}
    )
    chief, other = cluster_from_environment(first), cluster_from_environment(environment)

    assert chief.is_chief
    assert (chief.workers, chief.job_id) == (other.workers, other.job_id)


def test_another_job_has_another_address_and_id():
    one = cluster_from_environment(MPI_HOST)
    other = cluster_from_environment({**MPI_HOST, "PMIX_NAMESPACE": "another-id"})
    assert one.chief_address != other.chief_address
    assert one.job_id != other.job_id


@pytest.mark.parametrize("name", ALONE)
def test_one_process_is_one_process(name: str):
    cluster = cluster_from_environment(ALONE[name])
    assert (cluster.num_workers, cluster.is_chief) == (1, True)
    assert declared_job(ALONE[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_half_a_description_is_refused_with_what_to_write(name: str):
    environment, line = REFUSED[name]
    with pytest.raises(ClusterError, match=line):
        cluster_from_environment(environment)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_hosts_is_no_job(name: str):
    assert cluster_from_environment(LISTS[name]) is None


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_what_a_refusal_says_to_write_is_followed(row: Launcher):
    """The variables that stand in the line make the description whole, or say that the process is alone."""
    environment = numbered(row, 3, 4, 2) if row.size else {row.rank: "3"}
    if "RANK=" in row.line:
        environment |= {"RANK": "3", "WORLD_SIZE": "4"}
    cluster = cluster_from_environment({**environment, **WHERE})
    alone = cluster_from_environment({**environment, "RANK": "0", "WORLD_SIZE": "1"})
    assert (cluster.index, cluster.num_workers, cluster.chief_address) == (3, 4, ("hosta", 29500))
    assert (alone.num_workers, alone.is_chief) == (1, True)


def test_an_evaluator_of_vertex_ai():
    cluster = cluster_from_environment(cluster_spec("workerpool3", 0, **VERTEX, workerpool3=["e:2222"]))
    assert (cluster.task, cluster.index, cluster.is_chief, cluster.num_workers) == ("evaluator", 0, False, 3)


def test_one_tf_config_in_several_launched_processes_is_a_contradiction():
    written = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
    with pytest.raises(ClusterError, match=r"worker 0 of 1, and Open MPI's .* declare worker 1 of 2"):
        cluster_from_environment({**written, **MPI_HOST})


ONE_WORKER = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
CONTRADICTIONS = {name: environment for name, (environment, _) in FOLLOWED.items()} | {
    "PMIx": {"PMIX_RANK": "0"},
    "PMI": numbered(named("PMI"), 1, 2),
    "MVAPICH 1": numbered(named("MVAPICH 1"), 1, 2),
    "Kubeflow, elastic": {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"},
    "Volcano of two groups": {**VOLCANO, "VC_MASTER_HOSTS": "m"},
    "pbsdsh": PBSDSH,
    "Lightning's variables of a host": LIGHTNING,
}


@pytest.mark.parametrize("written", [{"TF_CONFIG": "{}"}, ONE_WORKER], ids=["empty", "one worker"])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_tf_config_of_one_worker_does_not_train_alone_in_each_process_of_a_job(name: str, written: Environment):
    with pytest.raises(ClusterError, match="set RANK=0 WORLD_SIZE=1"):
        declared_job({**CONTRADICTIONS[name], **written})


@pytest.mark.parametrize("name", [*ALONE, *LISTS])
def test_a_tf_config_of_one_worker_beside_a_description_of_one_process(name: str):
    cluster = cluster_from_environment({**(ALONE.get(name) or LISTS[name]), **ONE_WORKER})
    assert (cluster.source, cluster.num_workers) == ("TF_CONFIG", 1)


@pytest.mark.parametrize(
    ("environment", "index", "workers", "agrees"),
    [
        (SLURM_STEP, 1, 2, True),
        (SLURM_STEP, 0, 2, False),
        (SLURM_STEP, 1, 3, False),
        (SLURM_STEP, 2, 4, True),  # two processes in each task
        (SLURM_STEP, 1, 4, False),
        ({**SLURM_STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1, 2, True),
        ({**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1, 2, True),
        (SAGEMAKER, 1, 2, True),
        (SAGEMAKER, 0, 2, False),
        (SKYPILOT, 1, 2, True),
        (SKYPILOT, 1, 3, False),
        (KUBEFLOW, 0, 2, False),
        (VOLCANO, 0, 2, False),
        ({**VOLCANO, "VC_MASTER_HOSTS": "m"}, 2, 3, True),  # no variable numbers this task, and TF_CONFIG does
        (cluster_spec("workerpool1", 1), 2, 3, True),
        (cluster_spec("workerpool1", 1), 1, 3, False),
        (numbered(named("PMI"), 1, 2), 0, 2, False),
        ({"PMIX_RANK": "1"}, 1, 2, True),
    ],
)
def test_a_tf_config_must_agree_with_the_job_around_it(
    environment: Environment, index: int, workers: int, agrees: bool
):
    addresses = [f"host{number}:1" for number in range(workers)]
    task = {"type": "worker", "index": index}
    written = {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}
    if agrees:
        cluster = cluster_from_environment({**environment, **written})
        assert (cluster.source, cluster.index) == ("TF_CONFIG", index)
    else:
        with pytest.raises(ClusterError, match=f"TF_CONFIG declares worker {index} of {workers}, and .* declare"):
            cluster_from_environment({**environment, **written})


def test_a_step_of_slurm_may_have_tasks_that_evaluate():
    cluster = {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]}
    written = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})}
    assert declared_job({**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "3", **written}) is not None


@pytest.mark.parametrize("name", [*FOLLOWED, *REFUSED])
def test_a_mirrored_strategy_names_the_one_for_several_workers(
    monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry, name: str
):
    environment, _ = FOLLOWED.get(name) or REFUSED[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises((UsageError, ClusterError), match="MultiWorkerMirroredStrategy"):
        MirroredStrategy()


@pytest.mark.parametrize("name", LISTS)
def test_a_single_program_in_an_allocation_trains(
    monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry, name: str
):
    for variable, value in LISTS[name].items():
        monkeypatch.setenv(variable, value)
    MirroredStrategy().close()


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        ({**MPI_HOSTS, **WHERE}, LocalRank(rank=1, workers=2)),
        ({**numbered(LAUNCHERS[-1], 3, 4, 2), **WHERE}, LocalRank(rank=1, workers=2)),
        (KUBEFLOW, LocalRank()),
        (SAGEMAKER, LocalRank(rank=0, workers=1)),
    ],
)
def test_the_gpus_of_a_host_are_divided_among_its_processes(environment: Environment, local: LocalRank):
    assert find_local_rank(environment, cluster_from_environment(environment)) == local


def test_the_page_lists_every_launcher():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md").read_text()
    assert [row.name for row in TABLE if row.rank not in page] == []
