"""update(): sums divided once, clipping, skipping, and no weight touched by a bad loss; in every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import CollectiveError, NonFiniteLossError
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.optim.update import StepResult
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.watcher import Totals
from lockstep.strategies.mirrored import MirroredStrategy

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    nn.init.constant_(module.get_parameter("2.bias"), 0.5)
    return module


class Trainer:
    """Three replicas and a net; ``step`` runs update on a global batch, the last replica's shard being shorter."""

    def __init__(self, strategy: MirroredStrategy, dtype: torch.dtype = torch.float64, bias: float = 0.5) -> None:
        self.strategy, self.module = strategy, net().to(dtype)
        nn.init.constant_(self.module.get_parameter("2.bias"), bias)
        self.mirrored = strategy.mirror(self.module)
        plain = torch.optim.SGD(self.module.parameters(), 0.5, momentum=0.9)
        self.optimizer: MirroredOptimizer = strategy.mirror(plain)

    def step(self, shards: PerReplica[Tensor], **options: Any) -> StepResult:
        scaler: torch.amp.GradScaler | None = options.get("scaler")

        def body(x: Tensor) -> StepResult:
            total = self.mirrored(x).square().sum()
            (total if scaler is None else total * scaler.get_scale()).backward()
            return self.optimizer.update(here(), totals=Totals(total.detach(), float(len(x))), **options)

        results = self.strategy.run(body, (shards,))
        assert len({(r.total, r.count, r.skipped) for r in results} if isinstance(results, PerReplica) else {1}) == 1
        return results[0] if isinstance(results, PerReplica) else results  # type: ignore[no-any-return]


def shards(rows: Tensor) -> PerReplica[Tensor]:
    return PerReplica([rows[:3], rows[3:6], rows[6:]])


def alone(clip_norm: float | None = None, steps: int = 2) -> tuple[nn.Module, float | None]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
    norm = None
    for _ in range(steps):
        optimizer.zero_grad()
        module(ROWS).square().mean().backward()
        if clip_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), clip_norm))
        optimizer.step()
    return module, norm


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e9])
def test_an_update_is_the_mean_of_the_whole_batch(
    clip_norm: float | None, scaled: bool, layout: str, make_strategy: MakeStrategy
):
    trainer = Trainer(make_strategy(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    module, norm = alone(clip_norm)

    with torch.no_grad():
        expected = float(net()(ROWS).square().sum())
    results = [trainer.step(shards(ROWS), clip_norm=clip_norm, scaler=scaler) for _ in range(2)]

    assert results[0].total == pytest.approx(expected)
    assert (results[0].count, results[0].skipped) == (7.0, False)
    assert results[1].grad_norm == (None if norm is None else pytest.approx(norm))
    for duplicate in trainer.mirrored.copies:
        assert_close(duplicate.state_dict(), module.state_dict())
        assert all(parameter.grad is None for parameter in duplicate.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_alone(value: float, layout: str, make_strategy: MakeStrategy):
    trainer = Trainer(make_strategy(3))
    trainer.step(shards(ROWS))
    before = [parameter.detach().clone() for parameter in trainer.module.parameters()]
    bad = ROWS.clone()
    bad[6] = value

    with pytest.raises(NonFiniteLossError, match=r"the loss is (nan|inf); the weights are those before this update"):
        trainer.step(shards(bad))

    for duplicate in trainer.mirrored.copies:
        assert all(map(torch.equal, duplicate.parameters(), before))
    trainer.optimizer.zero_grad()
    assert trainer.step(shards(ROWS)).count == 7.0


def test_nothing_counted_skips_the_update(layout: str, make_strategy: MakeStrategy):
    trainer = Trainer(make_strategy(3))
    trainer.step(shards(ROWS))  # momentum, which would move the weights
    before = [parameter.detach().clone() for parameter in trainer.module.parameters()]
    result = trainer.step(PerReplica([ROWS[:0]] * 3))
    assert result == StepResult(0.0, 0.0, None, skipped=True)
    assert all(map(torch.equal, trainer.module.parameters(), before))


def test_an_overflow_skips_and_lowers_the_scale(layout: str, make_strategy: MakeStrategy):
    trainer = Trainer(make_strategy(3), dtype=torch.float32, bias=99.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [parameter.detach().clone() for parameter in trainer.module.parameters()]

    # The loss is finite; times the scale its gradients are not.
    result = trainer.step(shards(ROWS.float()), scaler=scaler)

    assert result.skipped
    assert math.isfinite(result.total)
    assert scaler.get_scale() == 2.0**126
    for duplicate in trainer.mirrored.copies:
        assert all(map(torch.equal, duplicate.parameters(), before))
        assert all(parameter.grad is None for parameter in duplicate.parameters())


def test_gradients_of_several_runs_add_up_until_the_update(layout: str, make_strategy: MakeStrategy):
    trainer = Trainer(make_strategy(3))
    module, _ = alone(steps=1)

    def accumulate(x: Tensor) -> None:
        trainer.mirrored(x).square().sum().backward()

    def update(count: int) -> None:
        trainer.optimizer.update(here(), totals=Totals(0.0, float(count)))

    for part in (ROWS[:4], ROWS[4:]):
        trainer.strategy.run(accumulate, (PerReplica([part[:2], part[2:3], part[3:]]),))
    trainer.strategy.run(update, (PerReplica([4, 2, 1]),))

    for duplicate in trainer.mirrored.copies:
        assert_close(duplicate.state_dict(), module.state_dict())


def test_sparse_gradients_are_summed(layout: str, make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    results = []
    words = torch.tensor([1, 2, 2, 5, 1, 0, 7])
    for replicas in (None, strategy):
        torch.manual_seed(0)
        module = nn.Embedding(8, 3, sparse=True)
        plain = torch.optim.SparseAdam(list(module.parameters()), 0.1)
        if replicas is None:
            module(words).square().mean(1).sum().div(7).backward()
            plain.step()
            results.append([module.weight.detach()])
            continue
        mirrored, optimizer = strategy.mirror(module), strategy.mirror(plain)

        def body(x: Tensor, mirrored: nn.Module = mirrored, optimizer: Any = optimizer) -> None:
            mirrored(x).square().mean(1).sum().backward()
            optimizer.update(get_replica_context(), totals=Totals(0.0, len(x)))

        strategy.run(body, (PerReplica([words[:3], words[3:6], words[6:]]),))
        results.append([duplicate.get_parameter("weight").detach() for duplicate in mirrored.copies])

    for weights in results[1]:
        torch.testing.assert_close(weights, results[0][0])


def test_a_replica_that_leaves_out_the_update_is_named(make_strategy: MakeStrategy):
    trainer = Trainer(make_strategy(3))

    def body(x: Tensor) -> None:
        if here().replica_id_in_sync_group != 1:
            trainer.optimizer.step()

    with pytest.raises(CollectiveError, match=r"replica 1 \(cpu:1\) has returned") as caught:
        trainer.strategy.run(body, (shards(ROWS),))
    assert "waits in optimizer update at test_update.py:" in str(caught.value)
    assert trainer.step(shards(ROWS)).count == 7.0
