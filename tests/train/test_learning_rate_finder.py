"""``ls.find_learning_rate``: one device's numbers on any layout, the suggestion, and that all is as before."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep as ls
from lockstep.errors import ConfigError, DataError
from lockstep.train.learning_rate_finder import LearningRateRange
from lockstep.train.model import Model

STEPS = 60
LOWEST, HIGHEST = 1e-4, 10.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(6, 1, generator=generator, dtype=torch.float64)


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(16) for part in rows()), strict=True))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def compiled(strategy: ls.Strategy, **settings: Any) -> Model:
    with strategy.scope():
        model = Model(network())
    model.compile(optimizer_of, "mse", **settings)
    return model


def by_hand() -> LearningRateRange:
    """The range test of one device, written out."""
    net = network()
    optimizer = optimizer_of(net.parameters())
    rates, losses = [LOWEST * (HIGHEST / LOWEST) ** (step / (STEPS - 1)) for step in range(STEPS)], []
    running, lowest = 0.0, math.inf
    for step, rate in enumerate(rates):
        x, y = batches()[step % 4]
        optimizer.param_groups[0]["lr"] = rate
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        running += 0.2 * (losses[-1] - running)
        lowest = min(lowest, running / (1 - 0.8 ** (step + 1)))
        if running / (1 - 0.8 ** (step + 1)) > 4 * lowest:
            break
    return LearningRateRange(rates=tuple(rates[: len(losses)]), losses=tuple(losses))


def check_equal(found: LearningRateRange) -> None:
    expected = by_hand()
    assert len(found.losses) < STEPS  # it diverged
    assert found.rates == pytest.approx(expected.rates, rel=1e-12)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.suggestion == pytest.approx(expected.suggestion, rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_model_has_one_device_s_numbers_and_is_as_before(make_strategy, replicas: int, tmp_path: Path):
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        """From 0.01, and an error after 20 updates."""
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.25, total_steps=20, cycle_momentum=False)

    model = compiled(make_strategy(replicas, seed=0), scheduler=schedule)
    before, rate, history = ls.fingerprint(model), model.learning_rate, model.history

    found = ls.find_learning_rate(model, batches(), lowest=LOWEST, highest=HIGHEST, steps=STEPS)

    check_equal(found)
    assert ls.fingerprint(model) == before
    assert (model.learning_rate, model.history, model.stop_training) == (rate, history, False)
    assert found.plot(tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_a_loop_of_ones_own_has_them_too(make_strategy):
    strategy = make_strategy(2, seed=0)
    net = network()
    mirrored, optimizer = strategy.mirror(net), strategy.mirror(optimizer_of(net.parameters()))

    def replica(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = ls.compute_average_loss((mirrored(batch[0]) - batch[1]).square().mean(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def step(batch: Any) -> Tensor:
        return strategy.reduce("sum", strategy.run(replica, (batch,)))

    before = ls.fingerprint(mirrored, optimizer)
    state = [mirrored, optimizer]
    check_equal(ls.find_learning_rate(step, batches(), state=state, lowest=LOWEST, highest=HIGHEST, steps=STEPS))
    assert ls.fingerprint(mirrored, optimizer) == before
    with pytest.raises(ConfigError, match="state="):
        ls.find_learning_rate(step, batches())
    with pytest.raises(DataError, match="without batches"):
        ls.find_learning_rate(step, [], state=state)


class Failing(Dataset[Any]):
    """Rows whose reading fails after a while, and that count what was read."""

    def __init__(self) -> None:
        self.reads = 0
        self.x, self.y = rows()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 100:
            raise LookupError("the disk is gone")
        return self.x[index], self.y[index]


def test_after_an_exception_all_is_as_before_the_data_s_generator_too(make_strategy):
    model = compiled(make_strategy(2, seed=0))
    model.fit(batches(), verbose=0)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Failing(), 16, shuffle=True, generator=generator)
    before = ls.fingerprint(model), generator.get_state(), torch.get_rng_state()

    with pytest.raises(LookupError, match="the disk is gone"):
        ls.find_learning_rate(model, loader)

    assert ls.fingerprint(model) == before[0]
    assert torch.equal(generator.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_groups_keep_their_ratio_and_a_loss_that_is_not_finite_ends_the_test():
    net = network()
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.02}]
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    model = Model(net)
    model.compile(Recording(groups), "mse")
    x, y = rows()
    y = y.clone()
    y[40] = math.inf

    found = ls.find_learning_rate(model, [(x[:32], y[:32]), (x[32:], y[32:])], steps=10)

    assert len(found.losses) == 1
    assert seen
    assert all(second == pytest.approx(first / 5) for first, second in seen)
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.1, 0.02]
    model.strategy.close()


def test_the_suggestion_is_where_the_smoothed_loss_falls_steepest():
    rates = tuple(10 ** (step / 10 - 5) for step in range(61))  # 1e-5 to 10
    losses = tuple(3 / (1 + math.exp(2 * (step - 30) / 5)) + max(0, step - 45) for step in range(61))
    found = LearningRateRange(rates=rates, losses=losses)

    assert found.suggestion == pytest.approx(1e-2)
    spiked = list(losses)
    spiked[10] += 1.5  # one bad batch
    assert LearningRateRange(rates=rates, losses=tuple(spiked)).suggestion == pytest.approx(1e-2, rel=0.3)
    assert LearningRateRange(rates=rates, losses=tuple(range(61))).suggestion is None
    assert LearningRateRange(rates=(), losses=()).suggestion is None


@pytest.mark.parametrize("numbers", [{"steps": 2}, {"lowest": 0.0}, {"highest": 1e-8}, {"diverged": 0.5}])
def test_a_number_that_cannot_be_is_refused(numbers: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        ls.find_learning_rate(compiled(ls.get_strategy()), batches(), **numbers)


def job() -> dict[str, Any]:
    model = compiled(ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0))
    before = ls.fingerprint(model)
    found = ls.find_learning_rate(model, batches(), lowest=LOWEST, highest=HIGHEST, steps=STEPS)
    return {"found": copy.deepcopy(found), "same": ls.fingerprint(model) == before}


@pytest.mark.slow
@pytest.mark.workers
def test_two_workers_agree_when_to_stop_and_have_one_device_s_numbers():
    result = ls.launch(job, workers=2)
    check_equal(result["found"])
    assert result["same"]
