"""update() on GPUs: decided there, never read, with the numbers that a read update has. On stand-ins for GPUs."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.stand_in import StandInDriver, stand_in_gpus
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.optim.update import StepResult
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep.replicas.watcher import Totals
from lockstep.strategies.mirrored import MirroredStrategy

MakeOptimizer = Callable[..., torch.optim.Optimizer]

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
OPTIMIZERS = {
    "sgd": lambda p, **options: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **options),
    "plain sgd": lambda p, **options: torch.optim.SGD(p, 0.1, **options),
    "adam": lambda p, **options: torch.optim.Adam(p, 0.01, amsgrad=True, **options),
    "adamw": lambda p, **options: torch.optim.AdamW(p, 0.01, **options),
    "adagrad": lambda p, **options: torch.optim.Adagrad(p, 0.1, **options),
}


class Trainer:
    """Replicas on stand-ins and a net; ``step`` is an update by a batch, whose loss is multiplied by ``times``."""

    def __init__(self, strategy: MirroredStrategy, driver: StandInDriver, make_optimizer: MakeOptimizer) -> None:
        torch.manual_seed(0)
        self.strategy, self.driver = strategy, driver
        self.module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.mirrored = strategy.mirror(self.module)
        self.plain = make_optimizer(self.module.parameters())
        self.optimizer: MirroredOptimizer = strategy.mirror(self.plain)

    def step(self, rows: Tensor = ROWS, times: float = 1.0, **options: Any) -> StepResult:
        scaler: torch.amp.GradScaler | None = options.get("scaler")

        def body(x: Tensor) -> StepResult:
            context = get_replica_context()
            total = self.mirrored(x).square().sum() * times
            (total if scaler is None else scaler.scale(total)).backward()
            count = torch.tensor(float(len(x)))  # like one of tokens, which only the device knows
            return self.optimizer.update(context, totals=Totals(total.detach(), count), **options)

        parts = [rows[:3], rows[3:5], rows[5:]][: len(self.strategy.devices)]
        return self.strategy.local_results(self.strategy.run(body, (PerReplica(parts),)))[0]  # type: ignore[no-any-return]

    def weights(self) -> list[Tensor]:
        """Copies of all replicas' weights."""
        return [each.detach().clone() for copy in self.mirrored.copies for each in copy.parameters()]

    def state(self) -> list[Tensor]:
        """Copies of the optimizer's state."""
        return [
            value.clone()
            for state in self.plain.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]


@contextmanager
def training(make_optimizer: MakeOptimizer) -> Iterator[Trainer]:
    with stand_in_gpus((2048, 2048, 2048)) as (devices, driver):
        strategy = MirroredStrategy(devices, seed=0)
        try:
            yield Trainer(strategy, driver, make_optimizer)
        finally:
            strategy.close()


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_an_update_that_is_read_and_nothing_is(name: str, clip_norm: float | None):
    def with_hook(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[name](parameters, fused=True)
        optimizer.register_step_post_hook(lambda *_: None)  # which has to know whether there was an update
        return optimizer

    results, weights = [], []
    for make_optimizer in (with_hook, OPTIMIZERS[name]):
        with training(make_optimizer) as trainer:
            trainer.step(clip_norm=clip_norm)
            with HostSyncs() as reads:
                result = trainer.step(ROWS * 2, clip_norm=clip_norm)
            assert bool(reads.syncs) is (make_optimizer is with_hook)
            assert trainer.driver.waits == 0
            assert trainer.plain.param_groups[0]["fused"] is (True if make_optimizer is with_hook else None)
            results.append([None if each is None else float(each) for each in (result.total, result.grad_norm)])
            weights.append(trainer.weights() + trainer.state())

    assert results[0] == results[1]
    assert equal(weights[0], weights[1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_from_a_loss_that_is_not_finite_on_nothing_is_touched_until_it_is_forgiven(name: str, value: float):
    with training(OPTIMIZERS[name]) as trainer:
        trainer.step()
        weights, state = trainer.weights(), trainer.state()

        bad, later = trainer.step(times=value), trainer.step()

        assert not math.isfinite(float(bad.total))
        assert math.isfinite(float(later.total))
        assert (float(bad.skipped), float(later.skipped)) == (1.0, 1.0)
        assert equal(trainer.weights(), weights)
        assert equal(trainer.state(), state)
        assert all(each.grad is None for copy in trainer.mirrored.copies for each in copy.parameters())

        trainer.optimizer.reset_nonfinite()
        assert float(trainer.step().skipped) == 0.0
        assert not equal(trainer.weights(), weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_counted_skips_that_update_alone_even_the_first(name: str):
    with training(OPTIMIZERS[name]) as trainer, training(OPTIMIZERS[name]) as other:
        before = trainer.weights()
        skipped = trainer.step(ROWS[:0])
        assert float(skipped.skipped) == 1.0
        assert equal(trainer.weights(), before)
        trainer.step()
        other.step()
        assert equal(trainer.weights(), other.weights())


def test_a_count_of_zero_that_the_host_knows_is_not_left_to_the_device():
    with training(OPTIMIZERS["adam"]) as trainer:

        def body() -> StepResult:
            return trainer.optimizer.update(get_replica_context(), totals=Totals(0.0, 0.0))

        result = trainer.strategy.local_results(trainer.strategy.run(body))[0]
        assert result == StepResult(0.0, 0.0, None, skipped=True)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_fp16_overflow_skips_and_lowers_the_scale_without_a_read(name: str):
    with training(OPTIMIZERS[name]) as trainer:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        scaler.scale(torch.ones(()))  # makes its tensors, for all replicas
        before = trainer.weights()
        with HostSyncs() as reads:
            overflowed = trainer.step(times=1e6, scaler=scaler)
        assert reads.syncs == []
        assert float(overflowed.skipped) == 1.0
        assert scaler.get_scale() == 2.0**126

        scaler.update(1024.0)
        assert equal(trainer.weights(), before)
        scaled = trainer.step(clip_norm=0.5, scaler=scaler)
        assert float(scaled.skipped) == 0.0

    with training(OPTIMIZERS[name]) as other:
        other.step(clip_norm=0.5)
        for mine, its in zip(trainer.weights(), other.weights(), strict=True):
            torch.testing.assert_close(mine, its)


def test_why_an_update_is_read_is_said_once(caplog: pytest.LogCaptureFixture):
    reasons = {
        "torch has no fused RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
        "foreach=True": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
        "with dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    }
    for reason, make_optimizer in reasons.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "lockstep"), training(make_optimizer) as trainer:
            results = [trainer.step(), trainer.step()]
        (record,) = caplog.records
        assert "the host waits for the GPU in every update" in record.getMessage()
        assert reason in record.getMessage()
        assert all(isinstance(result.total, float) and result.skipped is False for result in results)


def test_sparse_gradients_are_left_to_kernels_that_take_them():
    with stand_in_gpus() as (devices, _):
        strategy = MirroredStrategy(devices, seed=0)
        module = nn.Embedding(8, 3, sparse=True)
        mirrored = strategy.mirror(module)
        optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))
        before = module.weight.detach().clone()

        def body(words: Tensor) -> StepResult:
            total = mirrored(words).sum()
            total.backward()
            return optimizer.update(get_replica_context(), totals=Totals(total.detach(), float(len(words))))

        result = strategy.local_results(strategy.run(body, (PerReplica([torch.tensor([1, 2]), torch.tensor([2])]),)))[0]
        strategy.close()
        assert result.skipped is False
        torch.testing.assert_close(before - module.weight.detach(), _times(8, {1: 0.1 / 3, 2: 0.2 / 3}))


def _times(rows: int, moved: dict[int, float]) -> Tensor:
    expected = torch.zeros(rows, 3)
    for row, by in moved.items():
        expected[row] = by
    return expected


def test_steps_counted_on_the_host_go_on_on_the_device_and_back():
    with training(OPTIMIZERS["adam"]) as trainer:
        trainer.step()
        saved = copy.deepcopy(trainer.optimizer.state_dict())
        trainer.step()
        twice = trainer.weights()
        trainer.optimizer.load_state_dict(saved)
        hook = trainer.optimizer.register_step_post_hook(lambda *_: None)
        assert isinstance(trainer.step().total, float)  # one more, by torch's other kernels
        hook.remove()
        assert isinstance(trainer.step().total, Tensor)
        assert not equal(trainer.weights(), twice)
        steps = [float(state["step"]) for state in trainer.plain.state.values()]
        assert steps == [3.0] * len(steps)
