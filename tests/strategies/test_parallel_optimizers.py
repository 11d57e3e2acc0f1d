"""Optimizers of the program's own: where workers hold whole weights they do what they do on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests import oracle
from torch import nn

import lockstep as ls
from lockstep.errors import ConfigError

LIMIT_S = 120


class Clipping(torch.optim.SGD):
    """Looks at the norm of all its gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([parameter for group in self.param_groups for parameter in group["params"]], 0.1)
        return super().step(closure)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [(part, part.sum(1, keepdim=True)) for part in x.split(8)]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def by_hand() -> list[torch.Tensor]:
    module = oracle.train(network(), batches(), lambda p: Clipping(p, 0.1, momentum=0.9), nn.MSELoss()).module
    return [parameter.detach() for parameter in module.parameters()]


def trained(**layout: Any) -> list[torch.Tensor]:
    strategy = ls.ParallelStrategy(seed=0, device="cpu:0", **layout)
    try:
        with strategy.scope():
            model = ls.Model(network())
            model.compile(lambda parameters: Clipping(parameters, 0.1, momentum=0.9), "mse")
        model.fit(batches(), verbose=0)
        return [weight.clone() for weight in model.state_dict().values()]
    finally:
        strategy.close()


def test_of_one_worker():
    torch.testing.assert_close(trained(), by_hand(), rtol=1e-12, atol=1e-14)


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 30)
def test_of_workers_that_divide_rows_alone():
    weights = ls.launch(partial(trained, data=2), workers=2, timeout_s=LIMIT_S)
    torch.testing.assert_close(weights, by_hand(), rtol=1e-12, atol=1e-14)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        trained(data=2, shard_optimizer=True)
    return str(caught.value)


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 30)
def test_of_workers_that_hold_parts_of_its_state_is_refused():
    assert "which may look at whole weights" in ls.launch(refusal, workers=2, timeout_s=LIMIT_S)
