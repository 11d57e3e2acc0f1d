from __future__ import annotations

from typing import Any

import pytest
from tests.conftest import MakeStrategy
from tests.recipes.conftest import MakeConfig

from lockstep.errors import ConfigError
from lockstep_tools.recipes import exactness
from lockstep_tools.recipes.mlm.train import check_exactness


@pytest.mark.parametrize("order", ["grouped", "published"])
def test_three_replicas_compute_what_one_device_computes(order: str, tiny: MakeConfig, make_strategy: MakeStrategy):
    report = check_exactness(tiny(dropout=0.1, order=order), make_strategy(3), steps=3)
    assert report.steps == 3
    assert max(report.sgd.loss, report.adam.loss) < 1e-5
    assert report.sgd.weight < 1e-5
    assert report.sgd.moved > 1e-2
    assert report.adam.weight < 0.03  # three steps of 0.01: what rounding can become where a gradient is 0
    assert str(report).startswith(
        "3 replicas against one device in plain PyTorch, 3 steps, no dropout:\n  SGD   largest"
    )


def test_a_strategy_that_trains_on_less_shows(
    tiny: MakeConfig, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    real = exactness.train_in_plain_pytorch

    def lose_a_row(module: Any, batches: tuple[Any, ...], *args: Any) -> Any:
        return real(module, [({name: value[1:] for name, value in x.items()}, y[1:]) for x, y in batches], *args)

    monkeypatch.setattr(exactness, "train_in_plain_pytorch", lose_a_row)
    report = check_exactness(tiny(), make_strategy(2), steps=2)

    assert max(report.sgd.loss, report.adam.loss) > 1e-3
    assert report.sgd.weight > 1e-4


def test_at_least_one_step(tiny: MakeConfig, make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match="steps=0 was given, expected at least 1"):
        check_exactness(tiny(), make_strategy(2), steps=0)
