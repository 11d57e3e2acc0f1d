from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.checkpoint.state_adapters import in_order, with_strides_of_parameters

STATE = {
    "state": {0: {"step": 1}, 2: {"step": 3}},
    "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1, 2]}],
}
SAVED: dict[str, Any] = {"kind": "Adam", "names": [["w"], ["b", "c"]], "state": STATE}


def test_an_optimizer_with_its_parameters_in_another_order_gets_each_its_own():
    found = in_order(SAVED, [["w"], ["c", "b"]])
    assert found["state"] == {0: {"step": 1}, 1: {"step": 3}}
    assert found["param_groups"] == STATE["param_groups"]


@pytest.mark.parametrize("names", [None, [["w"], ["b", "c"]], [["v"], ["b", "c"]]])
def test_without_the_same_names_the_order_stays(names: Any):
    assert in_order(SAVED, names) is STATE
    assert in_order({"kind": "Adam", "state": STATE}, [["w"], ["c", "b"]]) is STATE


def test_a_checkpoint_goes_back_by_name(tmp_path: Path):
    strategy = ls.MirroredStrategy(["cpu:0"])

    def things(order: int) -> tuple[torch.nn.Module, ls.Checkpoint, Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(2, 2)
        mirrored = strategy.mirror(module)
        optimizer = strategy.mirror(torch.optim.Adam(list(module.parameters())[::order]))
        return module, ls.Checkpoint(model=mirrored, optimizer=optimizer), optimizer

    module, checkpoint, optimizer = things(1)
    module(torch.ones(1, 2)).sum().backward()
    strategy.run(optimizer.step)
    ls.CheckpointManager(checkpoint, tmp_path).save(1)
    other, again, restored = things(-1)
    again.restore(tmp_path)
    strategy.close()

    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], restored.state[two]["exp_avg"])


def test_moments_of_channels_last_weights_are_loaded_in_the_order_of_the_weights():
    weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    packed = {name: value.contiguous() for name, value in saved["state"][0].items()}  # as files hold them

    loaded = with_strides_of_parameters({**saved, "state": {0: packed}}, optimizer)["state"][0]

    assert loaded["exp_avg"].stride() == weight.stride()
    assert all(torch.equal(loaded[name], value) for name, value in saved["state"][0].items())
