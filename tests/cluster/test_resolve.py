"""Which form counts where several are set; and MirroredStrategy refuses to train a model in each of several workers."""

from __future__ import annotations

import json

import pytest

from lockstep.cluster.environment import cluster_from_environment, declared_job
from lockstep.config import DeviceRegistry
from lockstep.errors import ClusterError, UsageError
from lockstep.strategies.mirrored import MirroredStrategy

PAIR = {"worker": ["a:1", "b:1"]}
TWO_WORKERS = {"TF_CONFIG": json.dumps({"cluster": PAIR, "task": {"type": "worker", "index": 1}})}
EVALUATOR = {"TF_CONFIG": json.dumps({"cluster": PAIR, "task": {"type": "evaluator", "index": 0}})}
ALONE = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "c", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
}
EXPORTED = {"WORLD_SIZE": "3", "MASTER_ADDR": "n2", "MASTER_PORT": "23456"}  # what job scripts export for all tasks


@pytest.mark.parametrize(
    ("environment", "source"),
    [
        (TWO_WORKERS, "TF_CONFIG"),
        (TORCHRUN, "torchrun"),
        (SLURM, "SLURM"),
        ({**TWO_WORKERS, **SLURM, "SLURM_STEP_NUM_TASKS": "2"}, "TF_CONFIG"),
        ({**TWO_WORKERS, **TORCHRUN}, "TF_CONFIG"),
        ({**TWO_WORKERS, **TORCHRUN, **SLURM}, "TF_CONFIG"),
        ({**TORCHRUN, **SLURM}, "torchrun"),  # a launcher inside a job step
        ({**SLURM, **EXPORTED}, "SLURM"),
        ({**EVALUATOR, **TORCHRUN}, "TF_CONFIG"),
        ({**TWO_WORKERS, "RANK": "0", "WORLD_SIZE": "1"}, "TF_CONFIG"),  # a launcher around each worker alone
        ({"TF_CONFIG": "", **TORCHRUN}, "torchrun"),
    ],
)
def test_which_form_counts(environment: dict[str, str], source: str):
    cluster = cluster_from_environment(environment)
    assert cluster.source == source


def test_nothing_is_declared():
    assert cluster_from_environment({}) is None
    assert declared_job({}) is None


def test_a_job_step_takes_the_chief_that_its_script_exported():
    cluster = cluster_from_environment({**SLURM, **EXPORTED})
    assert cluster.chief_address == ("n2", 23456)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**TWO_WORKERS, **TORCHRUN, "RANK": "0"},
            r"^TF_CONFIG declares worker 1 of 2, and torchrun's RANK and WORLD_SIZE declare worker 0 of 2; unset",
        ),
        ({**TWO_WORKERS, **TORCHRUN, "WORLD_SIZE": "4"}, r"TF_CONFIG declares worker 1 of 2.*declare worker 1 of 4"),
        ({**ALONE, **TORCHRUN}, r"TF_CONFIG declares worker 0 of 1, and .* declare worker 1 of 2"),
        ({**TWO_WORKERS, **SLURM}, r"TF_CONFIG declares worker 1 of 2, and SLURM's .* declare worker 1 of 3; unset"),
        ({"WORLD_SIZE": "4"}, r"torchrun: RANK not set \(there is WORLD_SIZE='4'\)"),
        ({"TF_CONFIG": "{", **TORCHRUN}, r"TF_CONFIG: .* is not JSON"),
    ],
)
def test_contradictions_and_halves_are_refused(environment: dict[str, str], message: str):
    with pytest.raises(ClusterError, match=message):
        cluster_from_environment(environment)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        (TWO_WORKERS, ("TF_CONFIG", 2)),
        (TORCHRUN, ("torchrun", 2)),
        (SLURM, ("SLURM", 3)),
        ({**SLURM, **EXPORTED}, ("SLURM", 3)),
        (EVALUATOR, None),
        (ALONE, None),
        ({"TF_CONFIG": "{}"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"SLURM_NTASKS": "8"}, None),
    ],
)
def test_only_a_process_among_several_that_train_is_in_a_job(environment: dict[str, str], job: tuple[str, int] | None):
    found = declared_job(environment)
    assert (found and (found.source, found.num_workers)) == job


def test_this_process_own_environment_is_read(monkeypatch: pytest.MonkeyPatch):
    for name, value in TWO_WORKERS.items():
        monkeypatch.setenv(name, value)
    assert cluster_from_environment() == cluster_from_environment(TWO_WORKERS)
    assert declared_job() == cluster_from_environment(TWO_WORKERS)


def test_mirrored_strategy_names_the_other_class(monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry):
    monkeypatch.setenv("TF_CONFIG", TWO_WORKERS["TF_CONFIG"])
    with pytest.raises(UsageError, match=r"TF_CONFIG declares a job of 2 workers.*use MultiWorkerMirroredStrategy"):
        MirroredStrategy()


def test_mirrored_strategy_does_not_train_alone_where_the_job_is_malformed(
    monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry
):
    monkeypatch.setenv("TF_CONFIG", "{not json")
    with pytest.raises(ClusterError, match=r"TF_CONFIG: '{not json' is not JSON"):
        MirroredStrategy()


def test_an_evaluator_may_use_a_mirrored_strategy(monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry):
    monkeypatch.setenv("TF_CONFIG", EVALUATOR["TF_CONFIG"])
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync >= 1
    strategy.close()
