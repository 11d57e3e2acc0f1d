"""A ParallelStrategy takes the GPU that is its worker's; on one that is only described it trains as a loop by hand."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import pytest
import torch
from tests import oracle
from tests.stand_in import stand_in_gpus
from torch import Tensor, nn

import lockstep as ls
from lockstep import config
from lockstep.errors import ConfigError
from lockstep.parallel.deferred_init import move_to_device
from lockstep.parallel.mesh import backends_for


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    x = [torch.randn(rows, 8, generator=random).double() for rows in (6, 6, 1)]
    return [(each, each[:, :2]) for each in x]


@pytest.mark.parametrize("named", [None, "gpu:0", "cpu:0"])
def test_by_itself_it_takes_the_gpu_and_another_device_by_name(named: str | None):
    def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 1e-2)

    alone = oracle.train(network(), batches(), adam, nn.MSELoss(), clip_norm=0.5).module
    with stand_in_gpus(None) as (devices, driver), closing(ls.ParallelStrategy(device=named, seed=0)) as strategy:
        with strategy.scope():
            model = ls.Model(network())
            model.compile(adam, nn.MSELoss(reduction="none"), clip_norm=0.5)
        model.fit(batches(), verbose=0)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        on_gpu = named != "cpu:0"

        assert strategy.devices == (devices if on_gpu else tuple(config.list_logical_devices("CPU")))
        assert bool(driver.calls("swap_generator")) is on_gpu

    oracle.assert_close(weights, alone, 1e-12)


@pytest.mark.parametrize(
    ("kind", "nccl", "expected"), [("cpu", True, "own"), ("cpu", False, "own"), ("cuda", True, "cpu:own,cuda:nccl")]
)
def test_gloo_moves_tensors_of_the_host_and_nccl_those_of_gpus(kind: str, nccl: bool, expected: str):
    assert backends_for(kind, "own", nccl=nccl) == expected


def test_gpus_without_nccl_are_refused():
    with pytest.raises(ConfigError, match=r'over NCCL, which this torch was built without.*choose device="cpu:0"'):
        backends_for("cuda", "own", nccl=False)


def test_what_is_on_the_device_already_is_left_alone():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.data_ptr() for name, value in module.state_dict().items()}
    move_to_device(module, torch.device("cpu"))
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == before
