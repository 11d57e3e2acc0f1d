from __future__ import annotations

import pytest
from torch import nn

import lockstep as ls
from lockstep.errors import ConfigError
from lockstep.parallel.fsdp import units_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(2, 4)
        self.head.weight = self.words.weight


def test_layers_are_gathered_one_by_one():
    net = Net()

    assert units_of(net) == list(net.body.layers)


def test_a_layer_that_shares_a_weight_with_another_part_is_gathered_with_the_rest():
    net = Net()
    net.body.layers[1][0].bias = net.body.layers[2][0].bias

    assert units_of(net) == [net.body.layers[0]]


def test_what_has_no_weights_is_not_gathered():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    assert units_of(net) == [net[0]]


def test_a_pipeline_is_refused():
    cluster = ls.ClusterSpec(workers=["127.0.0.1:1", "127.0.0.1:2"], index=0)

    with pytest.raises(
        ConfigError, match=r"shard_parameters=True gathers .* choose shard_optimizer=True in a pipeline"
    ):
        ls.ParallelStrategy(pipeline=2, shard_parameters=True, cluster=cluster)
