"""Model.compile(compile_module=...): fit, evaluate and predict run compiled code, and compiling again ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lockstep.errors import ConfigError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Model

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_all_passes_run_one_code_and_a_module_compiled_without_runs_as_it_is(
    make_strategy: Callable[..., MirroredStrategy], batches: list[tuple[Tensor, Tensor]]
) -> None:
    def fitted(**settings: Any) -> tuple[Model, list[float]]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        with make_strategy(2).scope():
            model = Model(module)
        model.compile(optimizer=torch.optim.SGD(module.parameters(), 0.05), loss=nn.functional.mse_loss, **settings)
        return model, model.fit(batches, epochs=2, verbose=0).history["loss"]

    _, plain = fitted()
    assert counters["stats"]["unique_graphs"] == 0

    model, losses = fitted(compile_module={"backend": "aot_eager", "dynamic": False})
    # Shards of 2 rows and of 1: one code each, for both replicas.
    assert counters["stats"]["unique_graphs"] == 2
    assert losses == pytest.approx(plain, rel=1e-5)
    predicted = model.predict(batches)
    assert counters["stats"]["unique_graphs"] == 4
    torch.testing.assert_close(predicted, torch.cat([model.module(x) for x, _ in batches]))

    model.compile(loss=nn.functional.mse_loss)
    model.evaluate(batches, verbose=0)
    assert counters["stats"]["unique_graphs"] == 4


def test_settings_that_are_none(model: Model) -> None:
    with pytest.raises(ConfigError, match="compile_module='yes'; give True, False or a dict of mode, dynamic, backend"):
        model.compile(loss=nn.functional.mse_loss, compile_module="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="graphs=1"):
        model.compile(loss=nn.functional.mse_loss, graphs=1)  # type: ignore[arg-type]
