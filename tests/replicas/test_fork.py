"""A process that was forked after a strategy was made: it has no replica threads, and is told so at once."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls

LIMIT_S = 30.0
DATA = [(torch.ones(8, 4), torch.ones(8, 1))] * 3


def in_fork(act: Callable[[], Any]) -> str:
    """What ``act`` does in a forked process: the name of its error, and what that says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"nothing was raised: {act()}"
        except BaseException as error:  # noqa: BLE001  of whatever kind, it is told
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], LIMIT_S)
    said = os.read(reading, 10_000).decode() if ready else "it hangs"
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said


@pytest.fixture
def model(make_strategy: MakeStrategy) -> ls.Model:
    """A model that has been trained, so that its replicas' threads have run."""
    with make_strategy(2).scope():
        network = nn.Linear(4, 1)
        model = ls.Model(network)
        model.compile(torch.optim.SGD(network.parameters(), 0.1), loss=nn.MSELoss(reduction="none"))
    model.fit(DATA, verbose=0)
    return model


@pytest.mark.parametrize(
    "entry",
    [
        lambda model: model.strategy.run(lambda: 1),
        lambda model: model.fit(DATA, verbose=0),
        lambda model: model.evaluate(DATA, verbose=0),
        lambda model: model.predict([x for x, _ in DATA], verbose=0),
        lambda model: model.optimizer.step(),
    ],
    ids=["run", "fit", "evaluate", "predict", "optimizer"],
)
def test_what_takes_replica_threads_is_refused_at_once_in_a_fork(entry: Callable[[ls.Model], Any], model: ls.Model):
    said = in_fork(lambda: entry(model))
    assert said.startswith("UsageError")
    assert "forked" in said
    assert str(os.getpid()) in said
    model.fit(DATA, verbose=0)  # the process that has the threads goes on


def test_multiprocessings_fork_is_refused_too(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def work() -> None:
        try:
            strategy.run(lambda: 1)
        except ls.errors.UsageError:
            theirs.send("refused")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    try:
        assert ours.poll(LIMIT_S)
        assert ours.recv() == "refused"
    finally:
        process.kill()
        process.join()


def test_an_iteration_that_was_begun_before_the_fork_is_refused_in_it(make_strategy: MakeStrategy):
    iteration = iter(make_strategy(2).distribute_dataset(DATA * 10, prefetch=2))
    next(iteration)
    said = in_fork(lambda: list(iteration))
    assert said.startswith("UsageError")
    assert len(list(iteration)) == len(DATA) * 10 - 1


def test_a_strategy_of_the_forks_own_works(make_strategy: MakeStrategy):
    make_strategy(2).run(lambda: torch.ones(300, 300) @ torch.ones(300, 300))

    def own() -> float:
        strategy = ls.MirroredStrategy(["cpu:0"], seed=0)
        return float(strategy.run(lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum()))

    assert in_fork(own) == f"nothing was raised: {300.0**3}"


def test_the_forked_processes_of_a_data_loader_read_for_a_strategy(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    strategy.run(lambda: 1)
    rows = TensorDataset(torch.arange(12.0))
    loader = DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")
    sums = [strategy.run(lambda x: x[0].sum(), (batch,)) for batch in strategy.distribute_dataset(loader)]
    assert [float(strategy.reduce("sum", each)) for each in sums] == [6.0, 22.0, 38.0]
