"""What the first run of a step says of things that all replicas have in common."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.random import uniform
from torch import nn

import lockstep as ls
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

LIMIT_S = 30
BATCHES = [torch.ones(6, 2)] * 3
STEPS = {"count": 0}


def draw_from_python(x: torch.Tensor) -> None:
    random.random()


def draw_from_numpy(x: torch.Tensor) -> None:
    np.random.rand()


def draw_by_name(x: torch.Tensor) -> None:
    uniform(0, 1)


def draw_by_local_name(x: torch.Tensor) -> None:
    import random as dice

    dice.shuffle([1, 2])


def count_outside(x: torch.Tensor) -> None:
    STEPS["count"] += 1


class Loop:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, x: torch.Tensor) -> None:
        self.losses.append(1.0)


GENERATOR = np.random.default_rng(0)


def draw_from_a_shared_one(x: torch.Tensor) -> None:
    GENERATOR.random()


class Baseline:
    """A running mean that is bound anew by every update, and a count."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())
        self.count = 0

    def update(self, x: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        self.count += 1


class Agent(nn.Module):
    """A module that is not mirrored, whose own method is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None
        self.baseline = Baseline()

    def step(self, x: torch.Tensor) -> None:
        self.state = x.mean(0)


BASELINE = Baseline()
RUNNING = np.zeros(2)


def update_an_object(x: torch.Tensor) -> None:
    BASELINE.update(x)


def update_an_array(x: torch.Tensor) -> None:
    RUNNING[:] += 1


def rebind() -> Callable[[torch.Tensor], None]:
    state = None

    def keep(x: torch.Tensor) -> None:
        nonlocal state
        state = x

    return keep


class Learner:
    def __init__(self) -> None:
        self.baseline = Baseline()

    def step(self, x: torch.Tensor) -> None:
        self.baseline.update(x)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (draw_from_python, r"Python.*test_first_run\.py:\d+ in draw_from_python"),
        (draw_from_numpy, r"NumPy.*test_first_run\.py:\d+ in draw_from_numpy"),
        (draw_by_name, r"NumPy.*test_first_run\.py:\d+ in draw_by_name"),
        (draw_by_local_name, r"Python.*test_first_run\.py:\d+ in draw_by_local_name"),
        (draw_from_a_shared_one, "GENERATOR"),
        (count_outside, "STEPS"),
        (Loop().step, r"Loop\.losses"),
        (update_an_object, r"BASELINE\.mean.*BASELINE\.count"),
        (update_an_array, "RUNNING"),
        (rebind(), "'state' from outside"),
        (Learner().step, r"Learner\.baseline\.mean"),
        (Agent().step, r"Agent\.state"),
    ],
)
def test_what_replicas_share_is_said_in_the_first_run_and_never_again(
    make_strategy: MakeStrategy, step: Callable[..., Any], says: str
):
    strategy = make_strategy(2)
    first, second, _ = strategy.distribute_dataset(BATCHES)

    with pytest.warns(UserWarning, match=says) as told:
        strategy.run(step, (first,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, (second,))

    assert len(told) == 1
    assert told[0].filename == __file__


class Net(nn.Module):
    """A linear layer that counts in a buffer."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.linear, self.norm, self.counts = nn.Linear(2, 2), nn.BatchNorm1d(2), counts
        kind = torch.float32 if counts == "mean" else torch.int64
        self.register_buffer("seen", torch.zeros((), dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts == "rows":
            self.seen += len(x)
        elif self.counts == "steps":
            self.seen += 1
        elif self.counts == "mean":
            self.seen += x.mean()
        result: torch.Tensor = self.norm(self.linear(x))
        return result


@pytest.mark.parametrize("counts", ["rows", "mean"])
def test_a_buffer_that_counts_rows_is_said(make_strategy: MakeStrategy, counts: str):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net(counts))
    batches = [torch.arange(12.0).reshape(6, 2)]

    with pytest.warns(UserWarning, match="seen.*all_reduce"):
        strategy.run(mirrored, (next(iter(strategy.distribute_dataset(batches))),))


def test_what_is_right_is_not_warned_of(make_strategy: MakeStrategy):
    strategy, calls = make_strategy(2), [0]
    mirrored = strategy.mirror(Net("steps"))
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
    own = ls.PerReplica([random.Random(0), random.Random(1)])

    def step(x: torch.Tensor, generator: random.Random, scale: torch.Tensor) -> int:
        kept = []
        (mirrored(x) * scale).sum().backward()
        optimizer.step()
        kept.append(generator.random())
        return calls[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in strategy.distribute_dataset(BATCHES):
            strategy.run(step, (x, own, torch.ones(2)))

    assert int(mirrored.state_dict()["seen"]) == 3


def test_draws_of_a_thread_that_prepares_data_meanwhile_are_not_those_of_the_step(make_strategy: MakeStrategy):
    strategy, runs, drawn = make_strategy(2), threading.Event(), threading.Event()

    def prepare() -> None:
        runs.wait(LIMIT_S)
        random.random()
        drawn.set()

    def step(x: torch.Tensor) -> None:
        runs.set()
        assert drawn.wait(LIMIT_S)
        torch.random.initial_seed()  # `random` is a name of Python's global generator too

    thread = threading.Thread(target=prepare)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.run(step, (next(iter(strategy.distribute_dataset(BATCHES))),))
    thread.join()


def test_a_batch_that_was_not_divided_is_said(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Linear(2, 2))

    def step(x: torch.Tensor) -> None:
        mirrored(x).sum().backward()

    with pytest.warns(UserWarning, match=r"\(6, 2\).*distribute_dataset"):
        strategy.run(step, (BATCHES[0],))


def test_functions_that_cannot_be_hashed_are_gone_through(make_strategy: MakeStrategy):
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    # As torch.compile makes them, with what the compiled code needs among the constants.
    made = FunctionType(double.__code__.replace(co_consts=(*double.__code__.co_consts, {})), globals())

    strategy = make_strategy(2)

    assert strategy.run(lambda: made(torch.ones(()))).values == (2.0, 2.0)


def test_a_hook_that_keeps_features_outside_is_refused(make_strategy: MakeStrategy):
    strategy, features = make_strategy(2), {}
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net[1].register_forward_hook(lambda module, args, output: features.update(last=output))
    mirrored = strategy.mirror(net)

    with pytest.raises(UsageError, match="features"):
        strategy.run(mirrored, (next(iter(strategy.distribute_dataset(BATCHES))),))


def mean(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (scores - y).square().mean()


def two_means(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.l1_loss(scores, y) + 0.1 * nn.functional.mse_loss(scores, y)


def entropy(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, torch.zeros(len(y), dtype=torch.long))


def mean_by_replicas(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(scores, y) / 3


def average(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ls.compute_average_loss((scores - y).square().mean(1), global_batch_size=8)


def mean_as_a_part(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(scores, y) * (len(y) / 8)


def first_warnings(strategy: MirroredStrategy, loss: Callable[..., torch.Tensor], rows: int) -> list[str]:
    mirrored = strategy.mirror(nn.Linear(2, 2))

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        loss(mirrored(batch[0]), batch[1]).backward()

    batches = strategy.distribute_dataset([(torch.ones(rows, 2), torch.zeros(rows, 2))] * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            strategy.run(step, (batch,))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("loss", "rows"), [(mean, 9), (mean, 8), (two_means, 9), (entropy, 9), (mean_by_replicas, 8)])
def test_a_mean_over_the_shard_that_is_back_propagated_is_told(
    make_strategy: MakeStrategy, loss: Callable[..., torch.Tensor], rows: int
):
    (told,) = first_warnings(make_strategy(3), loss, rows)

    assert "step" in told
    assert "mean" in told
    assert "compute_average_loss" in told


@pytest.mark.parametrize(("loss", "rows"), [(average, 8), (average, 9), (mean_by_replicas, 9), (mean_as_a_part, 8)])
def test_a_part_of_the_mean_over_the_global_batch_is_not_told(
    make_strategy: MakeStrategy, loss: Callable[..., torch.Tensor], rows: int
):
    assert first_warnings(make_strategy(3), loss, rows) == []


def test_one_replica_may_back_propagate_a_mean(make_strategy: MakeStrategy):
    assert first_warnings(make_strategy(1), mean, 9) == []
