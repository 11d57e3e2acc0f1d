"""A seed that is the same in all replicas gives them the same numbers: a step's first run says so."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls

DATA = [torch.arange(24.0).reshape(6, 4)] * 3
STATE = torch.Generator().manual_seed(3).get_state()


def replica() -> int:
    context = ls.get_replica_context()
    return context.replica_id_in_sync_group


def seeds_torch(x: Tensor, step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn_like(x)


def seeds_in_a_fork(x: Tensor, step: int) -> Tensor:
    with torch.random.fork_rng():
        torch.random.manual_seed(step)
        return F.dropout(x, 0.5)


def sets_the_state(x: Tensor, step: int) -> Tensor:
    torch.set_rng_state(STATE)
    return torch.bernoulli(torch.full_like(x, 0.5))


def makes_a_generator(x: Tensor, step: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(step))


def sets_a_generator(x: Tensor, step: int) -> Tensor:
    generator = torch.Generator()
    generator.set_state(STATE)
    return torch.multinomial(torch.ones(9), 3, False, generator=generator)


def makes_one_of_numpy(x: Tensor, step: int) -> float:
    rng = np.random.default_rng(step)
    return float(rng.normal())


def makes_an_old_one_of_numpy(x: Tensor, step: int) -> float:
    rng = np.random.RandomState(step)
    return float(rng.rand())


def makes_one_of_python(x: Tensor, step: int) -> float:
    return random.Random(step).gauss(0, 1)


SAME = (
    *(seeds_torch, seeds_in_a_fork, sets_the_state, makes_a_generator, sets_a_generator, makes_one_of_numpy),
    *(makes_an_old_one_of_numpy, makes_one_of_python),
)


def seeds_by_replica(x: Tensor, step: int) -> Tensor:
    torch.manual_seed(2 * step + replica())
    return torch.randn_like(x)


def draws_nothing(x: Tensor, step: int) -> Tensor:
    torch.manual_seed(step)
    return x * 2


def makes_generators_by_replica(x: Tensor, step: int) -> tuple[Tensor, float, float]:
    rng = np.random.default_rng([step, replica()])
    drawn = torch.randn(4, generator=torch.Generator().manual_seed(2 * step + replica()))
    return drawn, float(rng.normal()), random.Random(2 * step + replica()).random()


def leaves_the_seeds_to_the_system(x: Tensor, step: int) -> float:
    rng, other = np.random.default_rng(), random.Random()
    return float(rng.normal()) + other.random()


def recomputes(x: Tensor, step: int) -> Tensor:
    weight = x.clone().requires_grad_()
    checkpoint(lambda value: F.dropout(value, 0.5).sum(), weight, use_reentrant=False).backward()
    assert weight.grad is not None
    return weight.grad


RIGHT = (
    *(seeds_by_replica, draws_nothing, makes_generators_by_replica, leaves_the_seeds_to_the_system, recomputes),
    lambda x, step: F.dropout(x, 0.5) + torch.randn(4),
)


def said(strategy: ls.Strategy, step: Callable[..., Any]) -> list[list[str]]:
    """The warnings of each run."""
    runs = []
    for number, x in enumerate(strategy.distribute_dataset(DATA)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(step, (x, number))
        runs.append([str(warning.message) for warning in caught])
    return runs


@pytest.mark.parametrize("step", SAME)
def test_the_same_numbers_in_all_replicas_are_said_once(make_strategy: MakeStrategy, step: Callable[..., Any]):
    (first,), *later = said(make_strategy(2), step)
    assert "same random numbers" in first
    assert f"in {step.__name__}" in first
    assert "replica_id_in_sync_group" in first
    assert later == [[], []]


@pytest.mark.parametrize("step", RIGHT)
def test_numbers_that_differ_by_replica_are_right(make_strategy: MakeStrategy, step: Callable[..., Any]):
    assert said(make_strategy(2), step) == [[], [], []]


@pytest.mark.parametrize("step", SAME)
def test_one_replica_may_seed_as_it_likes(make_strategy: MakeStrategy, step: Callable[..., Any]):
    assert said(make_strategy(1), step) == [[], [], []]


def test_the_warning_says_how_it_is_silenced(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with pytest.warns(UserWarning, match="same random numbers") as caught:
        strategy.run(seeds_torch, (next(iter(strategy.distribute_dataset(DATA))), 0))
    told = str(caught[0].message)
    arguments = eval(f"({told[told.index('filterwarnings(') + len('filterwarnings(') :].rpartition(')')[0]})")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(*arguments)
        assert said_of_a_new_step(make_strategy(2)) == 2


def said_of_a_new_step(strategy: ls.Strategy) -> int:
    def step(x: Tensor) -> int:
        torch.manual_seed(1)
        return len(torch.randn(2))

    return int(strategy.run(step, (next(iter(strategy.distribute_dataset(DATA))),)))


class Noisy(nn.Linear):
    """A module that seeds in its forward."""

    def __init__(self, *, by_replica: bool) -> None:
        super().__init__(4, 1)
        self.by_replica = by_replica

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3 + self.by_replica * replica())
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize("by_replica", [False, True])
def test_a_module_that_seeds_is_said_by_fit(make_strategy: MakeStrategy, by_replica: bool):
    strategy = make_strategy(2)
    with strategy.scope():
        module = Noisy(by_replica=by_replica)
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), nn.MSELoss())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit([(x, torch.zeros(6, 1)) for x in DATA], epochs=2, verbose=0)

    lines = [str(warning.message) for warning in caught]
    assert len(lines) == (0 if by_replica else 1)
    assert by_replica or "in forward" in lines[0]


# Workers with one replica each, which see their own draws alone.


def seeding_workers(index: int) -> None:
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], timeout_s=60)

    def alike(x: Tensor, step: int) -> Tensor:
        torch.manual_seed(step)
        return torch.randn_like(x)

    def by_worker(x: Tensor, step: int) -> Tensor:
        torch.manual_seed(2 * step + index)
        return torch.randn_like(x)

    for step in (alike, by_worker):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, x in enumerate(strategy.distribute_dataset(DATA)):
                strategy.run(step, (x, number))
        sys.stdout.write(f"{[str(warning.message) for warning in caught]}\n")
    strategy.close()


@pytest.mark.workers
def test_workers_that_seed_alike_say_so(start_job: Any):
    job = start_job(seeding_workers, "index")
    assert [worker.end() for worker in job] == [0, 0], [worker.errors for worker in job]
    for worker in job:
        alike, by_worker = worker.output.splitlines()
        assert alike.count("same random numbers in several replicas") == 1
        assert by_worker == "[]"
