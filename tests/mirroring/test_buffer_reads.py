"""Reads of a module's state by one worker alone: they give the averages of all, or are refused, and never wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import UsageError

REPLICAS = 4
MEAN = "1.running_mean"
State = dict[str, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


class WithTable(nn.Module):
    """A floating buffer that no step changes, as tables of positions are."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("table", torch.arange(3.0).double())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.table)
        return out


def rows(count: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, generator=random).double(), torch.arange(count) % 2


def plain_replicas(count: int) -> list[nn.Sequential]:
    """What each replica's module is after a step without an update, by hand."""
    x, _ = rows(count)
    modules = [net() for _ in range(REPLICAS)]
    for module, shard in zip(modules, x.tensor_split(REPLICAS), strict=True):
        if len(shard):
            module(shard)
    return modules


def plain_average(count: int) -> Tensor:
    return torch.stack([module.get_buffer(MEAN) for module in plain_replicas(count)]).mean(0)


# What the workers run.


def refused(read: Callable[[], Any]) -> str:
    try:
        read()
    except UsageError as error:
        return str(error)
    return "not refused"


def forward(mirrored: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor | None:
    return mirrored(batch[0]).detach() if len(batch[0]) else None


def by_hand(strategy: ls.Strategy) -> dict[str, Any]:
    mirrored, table = strategy.mirror(net()), strategy.mirror(WithTable())
    (batch,) = strategy.distribute_dataset([rows(12)])
    strategy.run(forward, (mirrored, batch))
    strategy.run(forward, (table, batch))
    found: dict[str, Any] = {}
    if strategy.workers.is_chief:  # the others go on to the next call
        found["state_dict"] = refused(mirrored.state_dict)
        found["buffers"] = refused(lambda: list(mirrored.buffers()))
        found["parameters"] = [name for name, _ in mirrored.named_parameters()]
        found["table"] = table.state_dict()["table"]
        mirrored.eval()
        mirrored.train()
    mirrored.sync_buffers()
    if strategy.workers.is_chief:
        found["synchronised"] = mirrored.state_dict()[MEAN].clone()
        found["as a buffer"] = dict(mirrored.named_buffers())[MEAN].clone()
    strategy.run(forward, (mirrored, batch))
    mirrored.eval()
    (given,) = strategy.distribute_dataset([rows(8)])
    found["evaluated"] = strategy.gather(strategy.run(forward, (mirrored, given)), axis=0)
    if not strategy.workers.is_chief:
        found["after evaluation"] = mirrored.state_dict()[MEAN].clone()
    return found


def without_rows(strategy: ls.Strategy) -> str:
    """The second worker's replicas call nothing, and its buffers are not the averages."""
    mirrored = strategy.mirror(net())
    (batch,) = strategy.distribute_dataset([rows(2)])
    strategy.run(few, (mirrored.eval(), batch))
    mirrored.train()
    strategy.run(few, (mirrored, batch))
    return "chief" if strategy.workers.is_chief else refused(mirrored.state_dict)


def few(mirrored: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    if len(batch[0]):
        mirrored(batch[0].repeat(2, 1))


class ChiefReads(ls.callbacks.Callback):
    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.read.append(self.model.state_dict()[MEAN].clone())


def by_fit(strategy: ls.Strategy) -> dict[str, Any]:
    with strategy.scope():
        module, reader = net(), ChiefReads()
        model = ls.Model(module)
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.0), loss=F.cross_entropy)
        model.fit([rows(12)], verbose=0, callbacks=[reader])
    found = {"own": [copy.get_buffer(MEAN).clone() for copy in strategy.mirrored_modules[-1].copies]}
    if strategy.workers.is_chief:
        found["epoch"] = reader.read
        found["after"] = [model.state_dict()[MEAN]]
    return found


def run_job() -> dict[str, Any]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    strategy = ls.MultiWorkerMirroredStrategy()
    own = {"by hand": by_hand(strategy), "by fit": by_fit(strategy), "without rows": without_rows(strategy)}
    from lockstep.collectives.communicator import all_gather_object

    everyones = all_gather_object(strategy.workers, "results", torch.utils._pytree.tree_map(as_list, own))
    strategy.close()
    return {name: [theirs[name] for theirs in everyones] for name in own}


def as_list(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, Tensor) else leaf


# The tests.


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return ls.launch(run_job, workers=2, timeout_s=120)


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.workers
@pytest.mark.parametrize("read", ["state_dict", "buffers"])
def test_a_read_that_would_have_to_wait_is_refused_at_once(results: dict[str, Any], read: str):
    chief, _ = results["by hand"]
    assert "mirrored.sync_buffers()" in chief[read]
    assert MEAN in chief[read]


@pytest.mark.workers
def test_what_no_replica_changes_is_read_by_one_worker(results: dict[str, Any]):
    chief, _ = results["by hand"]
    assert chief["parameters"] == [name for name, _ in net().named_parameters()]
    assert chief["table"] == [0.0, 1.0, 2.0]


@pytest.mark.workers
def test_after_sync_buffers_one_worker_reads_the_averages(results: dict[str, Any]):
    chief, _ = results["by hand"]
    close(chief["synchronised"], plain_average(12))
    close(chief["as a buffer"], plain_average(12))


@pytest.mark.workers
def test_a_run_after_eval_is_the_averages(results: dict[str, Any]):
    averaged = net().eval()
    averaged.load_state_dict(
        {
            name: torch.stack([module.state_dict()[name] for module in plain_second_pass()]).double().mean(0)
            for name in averaged.state_dict()
        }
    )
    chief, other = results["by hand"]

    close(chief["evaluated"], averaged(rows(8)[0]).detach())
    close(other["after evaluation"], averaged.get_buffer(MEAN))


def plain_second_pass() -> list[nn.Sequential]:
    """The replicas after a pass, an average of the buffers, and another pass."""
    replicas = plain_replicas(12)
    first = {name: torch.stack([each.get_buffer(name) for each in replicas]).double().mean(0) for name in BUFFERS}
    for module, shard in zip(replicas, rows(12)[0].tensor_split(REPLICAS), strict=True):
        for name in BUFFERS:
            module.get_buffer(name).copy_(first[name])
        module(shard)
    return replicas


BUFFERS = [name for name, _ in net().named_buffers()]


@pytest.mark.workers
def test_a_worker_that_had_no_rows_does_not_give_its_own_for_the_averages(results: dict[str, Any]):
    assert "mirrored.sync_buffers()" in results["without rows"][1]


@pytest.mark.workers
def test_after_an_epoch_and_after_fit_the_chief_reads_alone(results: dict[str, Any]):
    chief, other = results["by fit"]
    own = [module.get_buffer(MEAN) for module in plain_replicas(12)]
    close(chief["own"] + other["own"], torch.stack(own))
    close(chief["epoch"], plain_average(12)[None])
    close(chief["after"], plain_average(12)[None])


@pytest.mark.parametrize("whose", ["mirrored", "plain"])
def test_eval_of_the_mirrored_or_of_the_plain_module_evaluates_with_averages(make_strategy: MakeStrategy, whose: str):
    strategy, module = make_strategy(REPLICAS), net()
    mirrored = strategy.mirror(module)
    (batch,) = strategy.distribute_dataset([rows(12)])
    strategy.run(forward, (mirrored, batch))
    (mirrored if whose == "mirrored" else module).eval()
    outputs = strategy.gather(strategy.run(forward, (mirrored, batch)), axis=0)
    replicas = plain_replicas(12)
    averaged = net().eval()
    averaged.load_state_dict(
        {
            name: torch.stack([each.state_dict()[name] for each in replicas]).double().mean(0)
            for name in averaged.state_dict()
        }
    )

    torch.testing.assert_close(outputs, averaged(rows(12)[0]).detach(), rtol=1e-12, atol=1e-14)


def test_eval_inside_a_replica_is_said_to_be_its_own_once(
    make_strategy: MakeStrategy, caplog: pytest.LogCaptureFixture
):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(net())
    (batch,) = strategy.distribute_dataset([rows(12)])

    def evaluate(batch: tuple[Tensor, Tensor]) -> None:
        mirrored.eval()
        mirrored(batch[0])

    strategy.run(forward, (mirrored, batch))
    with caplog.at_level(logging.WARNING, "lockstep"):
        strategy.run(evaluate, (batch,))
        strategy.run(evaluate, (batch,))

    (message,) = [record.getMessage() for record in caplog.records if "eval()" in record.getMessage()]
    assert "outside strategy.run" in message


def test_a_buffer_that_came_after_mirroring_is_read_before_the_next_run(make_strategy: MakeStrategy):
    module = net()
    mirrored = make_strategy(2).mirror(module)
    module.register_buffer("seen", torch.tensor(3))
    module.register_buffer("scale", torch.tensor(0.5))
    assert mirrored.state_dict()["seen"] == 3
    assert dict(mirrored.named_buffers())["scale"] == 0.5
