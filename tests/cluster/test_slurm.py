"""A task of a SLURM job step is a worker; a batch script, an interactive shell and a process elsewhere are none."""

from __future__ import annotations

import pytest

from lockstep.cluster.slurm import first_host, is_job_step, parse_slurm, step_port
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[05-08]",
    "SLURM_NTASKS": "8",
}
# What `sbatch` gives the batch script itself (SLURM 20.11 and later).
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "4",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in STEP.items() if name not in names}


def test_a_task_is_a_worker():
    assert parse_slurm(STEP) == ClusterSpec(
        workers=("node07:19711", "", "", ""), index=2, job_id="slurm-4711.0", source="SLURM"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # the interactive step that salloc opens
        {**STEP, "SLURM_STEP_ID": "4294967291"},  # the batch script
        without("SLURM_STEP_NUM_TASKS"),
    ],
)
def test_what_is_no_task_declares_nothing(environment: dict[str, str]):
    assert not is_job_step(environment)
    assert parse_slurm(environment) is None


@pytest.mark.parametrize(
    ("changes", "chief"),
    [
        ({"SLURM_STEP_NODELIST": ""}, "node05:19711"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "old1,old2"}, "old1:19711"),
        ({"MASTER_ADDR": "ib-node07"}, "ib-node07:19711"),
        ({"MASTER_PORT": "23456"}, "node07:23456"),
        ({"MASTER_ADDR": "fd00::7", "MASTER_PORT": "23456"}, "[fd00::7]:23456"),
        ({"SLURM_STEP_ID": "1"}, "node07:27630"),
        ({"SLURM_STEP_ID": ""}, "node07:19711"),
    ],
)
def test_where_the_store_of_the_chief_listens(changes: dict[str, str], chief: str):
    cluster = parse_slurm({**STEP, **changes})
    assert cluster.workers[0] == chief


def test_hosts_in_an_arbitrary_order_do_not_say_where_task_0_is():
    """As SLURM 22.05 sets them for ``srun -m arbitrary`` with node10 first in its file: the list is sorted."""
    anywhere = {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_NODELIST": "node[08,10]"}
    with pytest.raises(
        ClusterError, match=r"arbitrary does not say which of 'node\[08,10\]' has task 0; set MASTER_AD"
    ):
        parse_slurm(anywhere)
    told, one_host = ({**anywhere, name: "node10"} for name in ("MASTER_ADDR", "SLURM_STEP_NODELIST"))
    assert parse_slurm(told) == parse_slurm(one_host)


def test_a_port_is_never_one_of_linux_own_and_steps_of_a_job_have_their_own():
    ports = [step_port(job, step) for job in (0, 1, 4711, 99_999_999) for step in range(100)]
    assert all(15000 <= port < 30000 for port in ports)
    assert len({step_port(4711, step) for step in range(100)}) == 100
    assert len({step_port(job, 0) for job in range(4711, 4811)}) == 100


def test_a_job_that_was_queued_again_is_another_attempt():
    cluster = parse_slurm({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert cluster.attempt == 2


def test_a_given_id_is_kept():
    cluster = parse_slurm({**STEP, "LOCKSTEP_JOB_ID": "mine"})
    assert cluster.job_id == "mine"


def test_a_single_task_is_a_cluster_of_one():
    cluster = parse_slurm({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert cluster.num_workers == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            without("SLURM_PROCID"),
            r"SLURM: SLURM_PROCID not set \(there is SLURM_STEP_NUM_TASKS='4' SLURM_JOB_ID='4711'",
        ),
        (without("SLURM_JOB_ID"), r"SLURM: SLURM_JOB_ID not set .*; srun sets them for every task: start the workers"),
        (
            without("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            r"SLURM: none of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_NODELIST and MASTER_ADDR is set; srun sets",
        ),
        ({**STEP, "SLURM_PROCID": "4"}, r"SLURM_PROCID=4 is beyond SLURM_STEP_NUM_TASKS=4.*--het-group=0 "),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "many"},
            r"SLURM: SLURM_STEP_NUM_TASKS='many'; it must be a whole number fro",
        ),
        ({**STEP, "SLURM_JOB_ID": "4711_3"}, r"SLURM: SLURM_JOB_ID='4711_3'; it must be a whole number from 0 up"),
        ({**STEP, "SLURM_STEP_ID": "x"}, r"SLURM: SLURM_STEP_ID='x'; it must be a whole number"),
        ({**STEP, "SLURM_RESTART_COUNT": "x"}, r"SLURM: SLURM_RESTART_COUNT='x'; it must be a whole number"),
        ({**STEP, "MASTER_PORT": "http"}, r"SLURM: MASTER_PORT='http'; it must be a whole number from 1 to 65535"),
        ({**STEP, "MASTER_ADDR": "a b"}, r"SLURM: MASTER_ADDR='a b' is not a host"),
        (
            {**STEP, "SLURM_STEP_NODELIST": "node[7-"},
            r"SLURM: SLURM_STEP_NODELIST: 'node\[7-' is not a list of hosts; for example 'node\[01-03,07\],log",
        ),
        ({**STEP, "SLURM_STEP_NODELIST": "n@de"}, r"SLURM: SLURM_STEP_NODELIST='n@de' is not a host"),
    ],
)
def test_what_is_malformed_is_named(environment: dict[str, str], message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_slurm(environment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "first", "is_only"),
    [
        ("hosta", "hosta", True),
        ("hosta,hostb", "hosta", False),
        ("node[08]", "node08", True),
        ("node[1-3]", "node1", False),
        ("node[01-03,07],other", "node01", False),
        ("node[098-101]", "node098", False),
        ("node[3,1]", "node3", False),
        ("a[0-1]b[2,4]", "a0b2", False),
        ("n[1-2].cluster.org,x-y", "n1.cluster.org", False),
        ("ip-26-0-129-85,ip-26-0-137-[14-15,22]", "ip-26-0-129-85", False),
        (" hosta,hostb\n", "hosta", False),
        ("[1-2]", "1", False),
    ],
)
def test_the_first_host_of_a_list(text: str, first: str, is_only: bool):
    assert first_host(text) == (first, is_only)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "hosta,", "hosta,,hostb", "node[1-3", "node1-3]", "node[]", "node[1-]", "node[-3]", "node[3-1]"),
        *("node[a-b]", "node[1,,2]", "node[[1-2]]", "host a"),
    ],
)
def test_a_malformed_list_of_hosts_is_shown(text: str):
    with pytest.raises(ClusterError, match=r" is not a list of hosts; for example 'node\[01-03,07\],login1'"):
        first_host(text)
