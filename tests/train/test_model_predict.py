from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.train.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.train.model import Model


class Outputs(NamedTuple):
    doubled: Tensor
    rows: Tensor


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Outputs]:
        return {"out": Outputs(x * 2, x[:, 0].long())}


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_predict_gives_every_row_once_in_order(replicas: int, make_strategy: MakeStrategy):
    x = torch.arange(22.0).view(11, 2)
    with make_strategy(replicas).scope():
        predicted = Model(Doubling()).predict(list(x.split(5)))
    assert torch.equal(predicted["out"].doubled, x * 2)
    assert torch.equal(predicted["out"].rows, x[:, 0].long())


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x,), lambda x: (x, x), lambda x: [x, x, x], lambda x: {"input": x}]
)
def test_predict_takes_inputs_of_any_kind_of_item(wrap: Any, make_strategy: MakeStrategy):
    x = torch.randn(5, 3)
    module = nn.Linear(3, 2)
    with make_strategy(2).scope():
        predicted = Model(module).predict([wrap(x)])
    torch.testing.assert_close(predicted, module(x).detach())
    assert not predicted.requires_grad


def test_predict_of_a_scalar_output_is_one_line(make_strategy: MakeStrategy):
    class Scalar(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    with make_strategy(2).scope(), pytest.raises(ConfigError, match=r"returned shape \(\) for 2 rows"):
        Model(Scalar()).predict([torch.ones(4)])
