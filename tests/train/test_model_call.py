"""What a Model is outside a training: called, shown, and its history drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.train.conftest import compiled
from torch import Tensor, nn

from lockstep.errors import DataError
from lockstep.train.logs import History

if TYPE_CHECKING:
    from tests.train.conftest import MakeStrategy

    from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_call_runs_the_module_in_evaluation_mode(make_strategy: MakeStrategy, batches: Batches):
    model = compiled(network(), make_strategy(2))
    model.fit(batches, verbose=0)
    x = batches[0][0]

    outputs = model(x)

    assert model.module.training
    torch.testing.assert_close(outputs, model.predict(x))
    torch.testing.assert_close(model(x.double().numpy()), outputs)
    model(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    x.requires_grad_(False)


def test_a_call_in_a_replica_runs_its_copy(make_strategy: MakeStrategy):
    model = compiled(nn.Linear(3, 1), make_strategy(2))
    outputs = model.strategy.run(lambda: model(torch.ones(2, 3)))
    assert torch.equal(outputs[0], outputs[1])


def test_the_line_that_shows_a_model(model: Model):
    assert all(part in repr(model) for part in ("Model(Linear", "4 parameters", "MirroredStrategy", "SGD"))


def test_the_history_is_drawn(model: Model, batches: Batches):
    history = model.fit(batches, validation_data=batches, epochs=4, validation_freq=2, verbose=0)

    (axes,) = history.plot().axes

    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "training": ([1, 2, 3, 4], history.history["loss"]),
        "validation": ([2, 4], history.history["val_loss"]),
    }
    assert axes.get_title() == "loss"
    with pytest.raises(DataError, match="train"):
        History().plot()


def test_numbers_and_scalars_are_arguments_too(make_strategy: MakeStrategy):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, *, by: float, plus: Tensor) -> Tensor:
            return x * by + plus

    model = compiled(Scaled(), make_strategy(1))
    assert model(np.ones(2), by=2.0, plus=torch.tensor(1.0)).tolist() == [3.0, 3.0]
