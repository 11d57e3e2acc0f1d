"""What is set on a module after mirroring, and hooks on its parameters, where several workers train it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls

pytestmark = pytest.mark.workers

STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.9), nn.Linear(5, 3)).double()


def rows(step: int) -> Tensor:
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(step)).double()


def change(module: Any, optimizer: torch.optim.Optimizer, step: int, seed: int) -> None:
    """Before the first step a setting; before the second a layer, whose first weights the seed decides."""
    if step == 0:
        module[1].p = 0.0
    if step == 1:
        torch.manual_seed(seed)
        module.append(nn.Linear(3, 3).double())
        module[3].register_forward_hook(lambda _, __, output: output * 2)
        optimizer.add_param_group({"params": module[3].parameters()})


def train(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def run_job() -> tuple[dict[str, Tensor], list[bool]]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    strategy = ls.MultiWorkerMirroredStrategy()
    module = net()
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.05, momentum=0.9))
    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        change(module, optimizer, number, strategy.workers.index)
        strategy.run(train, (mirrored, optimizer, x))
    mirrored.compare_weights()
    same = [
        torch.equal(mine, other)
        for duplicate in mirrored.copies
        for mine, other in zip(module.parameters(), duplicate.parameters(), strict=True)
    ]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    strategy.close()
    return state, same


def test_all_workers_train_as_one_device_from_the_chief_s_new_weights():
    plain = net()
    own = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
    for number in range(STEPS):
        change(plain, own, number, 0)
        train(plain, own, rows(number))
    state, same = ls.launch(run_job, workers=2, timeout_s=120)
    torch.testing.assert_close(state, dict(plain.state_dict()))
    assert all(same)


def update_outside(by_hand: bool) -> list[str]:
    torch.set_num_threads(1)
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"])
    mirrored = strategy.mirror(net())

    def step(x: Tensor) -> None:
        mirrored(x).square().sum().backward()
        with torch.no_grad():
            for each in mirrored.parameters() if not by_hand else ():
                each -= 0.05 * each.grad
                each.grad = None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in strategy.distribute_dataset([rows(number) for number in range(STEPS)]):
            strategy.run(step, (x,))
    strategy.close()
    return [str(each.message) for each in caught]


def test_gradients_that_no_optimizer_adds_up_over_the_workers_are_told_once():
    (told,) = ls.launch(update_outside, args=(True,), workers=2, timeout_s=120)
    assert "no mirrored optimizer" in told
    assert "sum_gradients" in told
    assert ls.launch(update_outside, args=(False,), workers=2, timeout_s=120) == []
