"""The manifests: YAML with the fields that Kubeflow's trainer and Kubernetes require, and commands of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep_tools.cli.app import parse

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
# What the Torch plugin of Kubeflow's trainer sets in every pod, with the values of the example.
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "flowers-node-0-0.flowers",
    "PET_MASTER_PORT": "29500",
}
JOB = {"JOB_UID": "0f1e"}  # the example's own


def load(name: str) -> dict[str, Any]:
    documents = list(yaml.safe_load_all((FOLDER / name).read_text()))

    assert len(documents) == 1
    manifest: dict[str, Any] = documents[0]
    return manifest


@pytest.fixture
def job() -> dict[str, Any]:
    return load("trainjob.yaml")


@pytest.fixture
def policy() -> dict[str, Any]:
    return load("network-policy.yaml")


def test_the_job_has_what_the_trainer_requires(job: dict[str, Any]):
    spec = job["spec"]

    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["metadata"]) == {"name", "namespace"}
    assert set(spec) == {"runtimeRef", "trainer", "runtimePatches"}
    assert spec["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    assert set(spec["trainer"]) == {
        *("image", "numNodes", "numProcPerNode", "command", "args", "env", "resourcesPerNode"),
    }
    assert isinstance(spec["trainer"]["numNodes"], int)
    assert isinstance(spec["trainer"]["numProcPerNode"], int)
    assert all(isinstance(word, str) for word in (*spec["trainer"]["command"], *spec["trainer"]["args"]))


def test_the_command_is_one_of_ours(job: dict[str, Any]):
    trainer = job["spec"]["trainer"]
    program, command, *rest = [*trainer["command"], *map(expand, trainer["args"])]

    assert (program, command) == ("lockstep", "run")
    assert rest == [
        *("--workers", "4", "--nodes", "2", "--index", "1", "--hosts", "flowers-node-0-0.flowers:29500"),
        *("--job", "0f1e", "--max-restarts", "3", "--stop-s", "100"),
        *("/workspace/train.py", "--backup", "/checkpoints/flowers"),
    ]
    assert callable(parse([command, *rest]))  # it can be run, and was not


def test_every_worker_has_a_gpu_and_the_job_an_id(job: dict[str, Any]):
    trainer = job["spec"]["trainer"]
    limits = trainer["resourcesPerNode"]["limits"]
    ids = [variable for variable in trainer["env"] if variable["name"] in JOB]

    assert int(limits["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    assert [one["valueFrom"]["fieldRef"]["fieldPath"] for one in ids] == [
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    ]
    # The trainer refuses a job that sets those itself.
    assert [variable["name"] for variable in trainer["env"] if variable["name"] in PET] == []


def test_what_is_mounted_is_there(job: dict[str, Any]):
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert (node["name"], container["name"]) == ("node", "node")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert job["spec"]["trainer"]["args"][-1].rpartition("/")[0] in {
        mount["mountPath"] for mount in container["volumeMounts"]
    }
    assert pod["terminationGracePeriodSeconds"] > 100  # --stop-s


def test_the_policy_lets_the_pods_of_the_job_alone_reach_each_other(job: dict[str, Any], policy: dict[str, Any]):
    mine = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["metadata"]["namespace"] == job["metadata"]["namespace"]
    assert policy["spec"] == {
        "podSelector": mine,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": mine}]}],
    }


def expand(word: str) -> str:
    """Kubernetes writes a container's variables into its arguments; one that it does not know stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda name: (PET | JOB)[name[1]], word)
