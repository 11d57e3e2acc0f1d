"""The measured step trains what one device would train, and its clocks account for all of its time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import train
from torch import Tensor, nn

from lockstep.errors import DataError
from lockstep_tools.recipes.training import Task
from lockstep_tools.scaling.measure import PARTS, measure

ROWS, BATCH = 22, 8  # two full batches and one of 6 rows: 2, 2, 2 and 0 on four replicas


class Batches:
    """Made-up rows, in another order in every epoch."""

    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(3)
        self._x = torch.randn(rows, 5, generator=generator)
        self._y = torch.randint(3, (rows,), generator=generator)
        self._epoch = 0
        self.iterated: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self._x) / BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.iterated.append(self._epoch)
        order = torch.randperm(len(self._x), generator=torch.Generator().manual_seed(self._epoch))
        return iter([(self._x[rows], self._y[rows]) for rows in order.split(BATCH)][::-1])  # a short one first


class Picky(nn.Sequential):
    """Fails on no rows, as many modules do."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "a shard without rows was given to the module"
        return super().forward(x)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return Picky(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def make_task(batches: Batches) -> Task:
    return Task(
        source="made up",
        config=None,
        module=make_module(),
        parameters=0,
        train=batches,
        valid=(),
        test=(),
        metrics={},
        settings=dict,
        optimizer=optimizer,
        loss=lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"),
    )


def one_device(warm_up: int, timed_steps: int) -> float:
    """The last loss of the plain loop over the same batches."""
    batches, measured = Batches(), list[tuple[Tensor, Tensor]]()
    for epoch, most in [(0, warm_up), *((epoch, 3) for epoch in range(1, 9))]:
        batches.set_epoch(epoch)
        measured += list(batches)[:most]
    return train(make_module(), measured[: warm_up + timed_steps], optimizer).losses[-1]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_loss_is_that_of_one_device_over_the_same_batches(make_strategy, replicas: int):
    record = measure(make_strategy(replicas), make_task(Batches()), batch_size=BATCH, warm_up=2, timed_steps=5)
    assert record.loss == pytest.approx(one_device(2, 5), rel=1e-5)


def test_the_timed_steps_begin_an_epoch_and_go_on_into_the_next(make_strategy):
    batches = Batches()
    record = measure(make_strategy(2), make_task(batches), batch_size=BATCH, warm_up=1, timed_steps=6)
    assert batches.iterated == [0, 1, 2]
    assert (len(record.step_ms), record.examples, record.steps_an_epoch) == (6, 2 * ROWS, 3)
    assert record.source == "made up"


def test_the_parts_of_every_step_are_times_and_add_up_to_it(make_strategy):
    record = measure(make_strategy(4), make_task(Batches()), batch_size=BATCH, warm_up=1, timed_steps=3)
    assert [step.step for step in record.parts] == list(record.step_ms)
    for step in record.parts:
        spent = [getattr(step, part) for part in PARTS]
        assert sum(spent) == pytest.approx(step.step)
        assert min(spent) >= 0
        assert min(step.forward, step.backward, step.exchange, step.update, step.other) > 0
    assert sum(record.step_ms) / 1000 == pytest.approx(record.timed_s, rel=0.05)


def test_an_epoch_of_less_than_one_batch_is_refused(make_strategy):
    with pytest.raises(DataError, match="an epoch has 6 examples, fewer than one global batch of 8"):
        measure(make_strategy(2), make_task(Batches(6)), batch_size=BATCH, warm_up=1, timed_steps=1)


def test_one_batch_that_is_short_is_no_error(make_strategy):
    measure(make_strategy(2), make_task(Batches(9)), batch_size=BATCH, warm_up=2, timed_steps=2)
