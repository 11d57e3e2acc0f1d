"""Metrics that users write: equal to those of one device, or refused in the first step."""

from __future__ import annotations

import pytest
import torch
from tests.train.conftest import MakeStrategy
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.errors import ConfigError
from lockstep.train.model import Model

Batch = tuple[Tensor, Tensor]


class Sums(Metric):
    """The mean error of all values."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += (outputs - targets).abs().sum()
        self.count += targets.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class MeansOfUpdates(Sums):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += (outputs - targets).abs().mean()
        self.count += 1


class MeanState(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.value = (outputs - targets).abs().mean()

    def compute(self) -> Tensor:
        return self.value


class NoState(Metric):
    """Keeps what torchmetrics does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.errors.append((outputs - targets).abs().flatten())

    def compute(self) -> Tensor:
        return torch.cat(self.errors).mean()


class Updates(Sums):
    def compute(self) -> Tensor:
        return torch.tensor(float(self._update_count))


class DeferredMetric(Metric):
    """All rows are kept, and the largest error of the two halves of them is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.errors.append((outputs - targets).abs().flatten())

    def compute(self) -> Tensor:
        errors = self.errors if isinstance(self.errors, Tensor) else torch.cat(self.errors)
        return errors.median()


def data() -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(17, 3, generator=random, dtype=torch.float64)
    return list(zip(x.split((7, 7, 2, 1)), x.sum(1, keepdim=True).split((7, 7, 2, 1)), strict=True))


def model_with(metric: Metric, replicas: int, make_strategy: MakeStrategy) -> Model:
    torch.manual_seed(0)
    with make_strategy(replicas).scope():
        model = Model(nn.Linear(3, 1).double())
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.0), loss=nn.MSELoss(), metrics={"error": metric})
    return model


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("kind", [Sums, DeferredMetric])
def test_sums_and_kept_rows_are_those_of_one_device(kind: type[Metric], replicas: int, make_strategy: MakeStrategy):
    model = model_with(kind(), replicas, make_strategy)
    plain = kind()
    with torch.no_grad():
        for x, y in data():
            plain.update(model.module(x), y)
    fitted = model.fit(data(), verbose=0).history["error"][-1]
    evaluated = model.evaluate(data(), verbose=0)["error"]
    assert [fitted, evaluated] == pytest.approx([float(plain.compute())] * 2, rel=1e-9)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", [MeansOfUpdates, MeanState, NoState, Updates])
def test_means_and_unknown_states_are_refused(kind: type[Metric], replicas: int, make_strategy: MakeStrategy):
    model = model_with(kind(), replicas, make_strategy)
    for call in (model.fit, model.evaluate):
        with pytest.raises(ConfigError, match=f"metric 'error', a {kind.__name__}, gives .* for all rows"):
            call(data(), verbose=0)


@pytest.mark.parametrize("kind", [MeansOfUpdates, MeanState])
def test_one_replica_takes_them(kind: type[Metric], make_strategy: MakeStrategy):
    model = model_with(kind(), 1, make_strategy)
    plain = kind()
    with torch.no_grad():
        for x, y in data():
            plain.update(model.module(x), y)
    assert model.evaluate(data(), verbose=0)["error"] == pytest.approx(float(plain.compute()), rel=1e-9)
