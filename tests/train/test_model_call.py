"""What a Model is outside a training: called, shown, and its history drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.train.conftest import MakeStrategy, compiled
from torch import Tensor, nn

from lockstep.errors import DataError
from lockstep.train.logs import History
from lockstep.train.model import Model
from lockstep.train.summary import summary_table

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


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_summary_shows_layers_shapes_and_sums(make_strategy: MakeStrategy, capsys: pytest.CaptureFixture[str]):
    module = network()
    module[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]  # a Sequential
    model = compiled(module, make_strategy(2))

    model.summary(np.zeros((5, 3)))

    heading, _, first, norm, *_, last, empty, parameters, memory = lines_of(capsys.readouterr().out)
    assert heading == ["layer", "output", "shape", "parameters", "trained"]
    assert first == ["0", "(Linear)", "(5,", "8)", "32", "8"]
    assert norm[-2:] == ["16", "16"]
    assert last == ["3", "(Linear)", "(5,", "1)", "9", "9"]
    assert not empty
    assert parameters == ["parameters:", "57,", "33", "trained"]
    assert "MiB" in memory
    assert not module[0]._forward_hooks  # type: ignore[index]

    model.summary(depth=0)
    assert lines_of(capsys.readouterr().out)[2] == ["(itself)", "(Sequential)", "57", "33"]


def test_shared_weights_count_once():
    first = nn.Linear(3, 3)
    table = summary_table(nn.Sequential(first, nn.Tanh(), first), {}, depth=None, width=None)
    assert "parameters: 12, 12 trained" in table


@pytest.mark.parametrize("width", [40, 80])
def test_the_summary_fits_the_terminal(width: int):
    deep = nn.Sequential()
    for name in ["a_rather_long_name_of_a_block"] * 5:
        deep = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({name: deep}))
    table = summary_table(deep, {}, depth=None, width=width)
    assert max(map(len, table.splitlines()[:-3])) <= width
    assert "…" in table
