"""A step of an optimizer that should have been mirrored is an error in a replica, and fine everywhere else."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn

from lockstep.errors import UsageError


@pytest.mark.parametrize("whose", ["the user's", "the replica's"])
def test_a_plain_step_on_mirrored_parameters_is_refused_and_changes_nothing(make_strategy: MakeStrategy, whose: str):
    strategy = make_strategy(2)
    module = nn.Linear(3, 1)
    mirrored = strategy.mirror(module)
    users = torch.optim.SGD(module.parameters(), 0.1)
    before = module.weight.detach().clone()

    def step() -> None:
        mirrored(torch.ones(2, 3)).sum().backward()
        optimizer = users if whose == "the user's" else torch.optim.SGD(mirrored.parameters(), 0.1)
        optimizer.step()

    with pytest.raises(UsageError, match=r"SGD.step was called in one replica.*strategy.mirror\(optimizer\)"):
        strategy.run(step)
    assert torch.equal(module.weight, before)


def test_optimizers_of_other_parameters_and_other_places_step_as_ever(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Linear(3, 1)
    mirrored = strategy.mirror(module)
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    in_lockstep = strategy.mirror(optimizer)

    def step() -> float:
        own = nn.Parameter(torch.ones(1))
        own.grad = torch.ones(1)
        torch.optim.SGD([own], 0.5).step()
        mirrored(torch.ones(2, 3)).sum().backward()
        in_lockstep.step()
        return float(own.detach())

    assert strategy.local_results(strategy.run(step)) == (0.5, 0.5)
    weight = module.weight.detach().clone()
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, weight)
