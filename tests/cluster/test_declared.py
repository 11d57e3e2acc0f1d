"""A job of several workers is recognised, and MirroredStrategy refuses to train a model in each of them."""

from __future__ import annotations

import json

import pytest

from lockstep.cluster.declared import DeclaredJob, find_job
from lockstep.config import DeviceRegistry
from lockstep.errors import UsageError
from lockstep.strategies.mirrored import MirroredStrategy

TWO_WORKERS = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
CHIEF_AND_WORKER = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}})


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"TF_CONFIG": TWO_WORKERS}, DeclaredJob(source="TF_CONFIG", workers=2)),
        ({"TF_CONFIG": CHIEF_AND_WORKER}, DeclaredJob(source="TF_CONFIG", workers=2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, DeclaredJob(source="WORLD_SIZE", workers=4)),
        ({"SLURM_STEP_NUM_TASKS": "3"}, DeclaredJob(source="SLURM_STEP_NUM_TASKS", workers=3)),
        ({"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}, None),
        ({"TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"], "evaluator": ["c:1"]}})}, None),
        ({"TF_CONFIG": "{not json"}, None),
        ({"TF_CONFIG": "[]"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"SLURM_NTASKS": "8"}, None),
        ({}, None),
    ],
)
def test_only_several_training_workers_are_a_job(environment: dict[str, str], job: DeclaredJob | None):
    assert find_job(environment) == job


def test_mirrored_strategy_names_the_other_class(monkeypatch: pytest.MonkeyPatch, fresh_devices: DeviceRegistry):
    monkeypatch.setenv("TF_CONFIG", TWO_WORKERS)
    with pytest.raises(UsageError, match=r"TF_CONFIG declares a job of 2 workers.*use MultiWorkerMirroredStrategy"):
        MirroredStrategy()
