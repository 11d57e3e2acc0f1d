"""``parallelize`` called twice with one module: it is divided once, whether its result was kept or not."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests import oracle
from torch import nn

import lockstep as ls
from lockstep.errors import UsageError

LIMIT_S = 120
pytestmark = [pytest.mark.workers, pytest.mark.timeout(LIMIT_S + 30), pytest.mark.usefixtures("one_core")]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator).double(), torch.randint(0, 4, (12,), generator=generator)


def plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def divided_twice(axis: str) -> dict[str, Any]:
    strategy = ls.ParallelStrategy(data=1, **{axis: 2})
    net = network()

    def divide(**arguments: Any) -> Any:
        return strategy.parallelize(net, plan(), **arguments) if axis == "tensor" else strategy.parallelize(net)

    divide()
    gc.collect()
    refusals = []
    for module, arguments in ((net, {"tensor_plan": "auto", "pipeline_split": ["2"]}), (copy.deepcopy(net), {})):
        with pytest.raises(UsageError) as caught:
            strategy.parallelize(module, **arguments)
        refusals.append(str(caught.value))
    first = divide().module
    gc.collect()
    same = divide().module is first
    with strategy.scope():
        model = ls.Model(net)
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), nn.CrossEntropyLoss())
        model.fit(*data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
        return {"same": same, "refusals": refusals, "weights": dict(model.state_dict())}


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_the_second_call_gives_the_same_part_and_other_arguments_are_refused(axis: str) -> None:
    found = ls.launch(divided_twice, workers=2, args=(axis,), timeout_s=LIMIT_S)
    assert found["same"]
    other, copied = found["refusals"]
    assert "has been divided already" in other
    assert "make the model anew" in other
    assert "before it was copied" in copied
    batches = list(zip(*(column.split(6) for column in data()), strict=True))
    expected = oracle.train(network(), batches, lambda parameters: torch.optim.SGD(parameters, 0.1), epochs=2)
    oracle.assert_close(found["weights"], expected.module, 1e-12)
