"""The flags that divide a model among workers: what they mean, what they refuse."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import MeshLayout
from lockstep_tools.cli.train import TrainMlm
from lockstep_tools.cli.training_flags import MeshFlags
from lockstep_tools.recipes.mlm.config import MlmConfig


def test_without_a_degree_nothing_is_divided():
    assert not MeshFlags().divides_model
    assert MeshFlags(replicas=2).divides_model


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        (MeshFlags(pipeline=2, tensor=2), 4),
        (MeshFlags(replicas=-1, tensor=2), 2),
        (MeshFlags(replicas=2, pipeline=2, tensor=2), 8),
    ],
)
def test_the_fewest_workers_are_one_replica_where_data_is_open(flags: MeshFlags, workers: int):
    assert flags.fewest_workers == workers
    assert flags.choose(workers).size == workers


def test_data_takes_what_the_others_leave():
    assert MeshFlags(pipeline=2, tensor=2).choose(8) == MeshLayout(data=2, pipeline=2, tensor=2)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"microbatches": 4}, "--microbatches"),
        ({"schedule": "gpipe"}, "--schedule"),
        ({"shard_optimizer": True}, "--shard-opt"),
    ],
)
def test_a_setting_of_the_division_needs_a_degree(given: dict, flag: str):
    with pytest.raises(ConfigError, match=f"^{flag}.* says how workers divide a model, and none of --replicas"):
        MeshFlags(**given)


@pytest.mark.parametrize(
    ("flags", "workers", "said"),
    [
        (MeshFlags(tensor=2), 3, "tensor=2 = 2 does not divide the 3 workers of the job"),
        (MeshFlags(replicas=2, tensor=2), 8, "is a mesh of 4 workers, and the job has 8; start 4"),
        (MeshFlags(pipeline=2), 1, "does not divide the 1 worker of the job"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(flags: MeshFlags, workers: int, said: str):
    with pytest.raises(ConfigError, match=said):
        flags.choose(workers)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (MeshFlags(pipeline=4, microbatches=2), "microbatches=2"),
        (MeshFlags(pipeline=4, stages_per_worker=2), "stages_per_worker=2"),
    ],
)
def test_pipelines_that_cannot_run_are_refused(flags: MeshFlags, said: str):
    with pytest.raises(ConfigError, match=said):
        flags.pipelining(flags.choose(4))


def test_devices_and_a_grid_do_not_go_together():
    with pytest.raises(ConfigError, match=r"--devices cpu:2 divides .*--pipeline 2 --tensor 2 gives .* leave one"):
        TrainMlm(devices="cpu:2", config=MlmConfig(), mesh=MeshFlags(pipeline=2, tensor=2))
