from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.conftest import MakeStrategy, compiled
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, SequentialLR, StepLR

from lockstep.errors import ConfigError
from lockstep.train.model import Model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8' is unknown; choose one of fp32, bf16, fp16"),
        ({"accumulate": 0}, "accumulate=0 was given, expected at least 1"),
        ({"clip_norm": 0.0}, r"clip_norm=0.0 was given, expected a number above 0"),
        ({"metrics": {"mse": print}}, "metric 'mse' is a builtin_function_or_method; give an instance"),
        ({"loss": 3}, "loss is a int; give a function"),
        ({"loss": None}, "compile got no loss, and the forward of Linear takes no labels"),
        ({"loss": "mes"}, "loss .mes. is unknown.*give a function"),
        ({"loss": {"scores": nn.MSELoss()}}, "loss is a dict; give a function"),
        ({"loss": nn.CrossEntropyLoss}, r"loss is the class CrossEntropyLoss; give a function"),
        ({"optimizer": 3}, "optimizer is a int; give a torch optimizer"),
        ({"optimizer": lambda parameters: 3}, "optimizer is a int; give a torch optimizer"),
        ({"scheduler": 3}, "scheduler is a int; give a torch scheduler"),
        (
            {"scheduler": lambda _: StepLR(torch.optim.SGD([torch.ones(1)]), 1)},
            "scheduler is a StepLR of another optimizer, .*make it from the optimizer given to compile",
        ),
        ({"scheduler": ReduceLROnPlateau}, "scheduler is a ReduceLROnPlateau, which steps by a metric"),
    ],
)
def test_bad_settings_are_refused_by_compile(make_strategy: MakeStrategy, settings: dict[str, Any], message: str):
    good: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "loss": nn.functional.mse_loss}
    with make_strategy(1).scope(), pytest.raises(ConfigError, match=message):
        Model(nn.Linear(3, 1)).compile(**(good | settings))


def test_a_scheduler_of_schedulers_is_accepted(make_strategy: MakeStrategy):
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler = SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], milestones=[1])
    model = compiled(module, make_strategy(1), optimizer=optimizer, loss=nn.functional.mse_loss, scheduler=scheduler)
    assert model.learning_rate == pytest.approx(0.1)
