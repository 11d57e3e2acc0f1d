from __future__ import annotations

import copy

import pytest
import torch
from tests.train.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.context import get_replica_context
from lockstep.train.compile import Precision
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def train(
    module: nn.Module, strategy: object, batches: Batches, precision: str
) -> tuple[list[float], list[torch.dtype]]:
    dtypes: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        dtypes.append(outputs.dtype)
        return nn.functional.smooth_l1_loss(outputs, targets, reduction="none")

    with strategy.scope():  # type: ignore[attr-defined]
        model = Model(copy.deepcopy(module))
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.05), loss=loss, precision=precision)  # type: ignore[arg-type]
    history = model.fit(batches, epochs=4, verbose=0)
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    return history.history["loss"], dtypes


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_trains_like_fp32(
    precision: str, dtype: torch.dtype, replicas: int, make_strategy: MakeStrategy, batches: Batches
):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    strategy = make_strategy(replicas)
    exact, _ = train(module, strategy, batches, "fp32")
    half, dtypes = train(module, strategy, batches, precision)
    assert set(dtypes) == {dtype}
    assert half == pytest.approx(exact, rel=0.03)
    assert half != exact


def test_the_first_scale_is_that_of_a_mean_divided_by_the_count(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    precision = Precision("fp16", "cpu")

    def scale(count: float) -> float:
        context = get_replica_context()
        assert context is not None
        return precision.scale(context, count)

    scales = strategy.local_results(strategy.run(scale, (PerReplica([4.0, 3.0]),)))

    assert scales == (65536.0 / 8, 65536.0 / 8)
    assert precision.scaler is not None


def test_an_overflow_skips_the_update_and_the_scheduler(make_strategy: MakeStrategy):
    module = nn.Linear(1, 1, bias=False)
    with make_strategy(2).scope():
        model = Model(module)
        model.compile(
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
            loss=lambda outputs, targets: outputs * 1.0,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0),
            precision="fp16",
        )
    before = module.weight.clone()

    model.fit([(torch.full((2, 1), 60000.0), torch.zeros(2, 1))], verbose=0)

    assert torch.equal(module.weight, before)
    assert model.scheduler is not None
    assert model.scheduler.last_epoch == 0


def test_fp32_needs_no_scaler_and_no_autocast(make_strategy: MakeStrategy):
    precision = Precision("fp32", "cpu")
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert precision.scaler is None
