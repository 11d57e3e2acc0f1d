"""What happens to gradients between the backward pass and the update, where they are exchanged during the first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from torch import Tensor, nn

import lockstep as ls
from lockstep.mirroring.gradients.bucketed_all_reduce import BucketExchange

pytestmark = pytest.mark.workers

LAST = 3
"""Of four replicas."""
ALL, NONE = 1.0, 0.0
"""Shares of the buckets."""
Change = Callable[[list[nn.Parameter], int], None]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=random).double(), torch.arange(n) % 3) for n in (8, 7, 8, 4)]


def written_to(parameters: list[nn.Parameter], _: int) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def replaced(parameters: list[nn.Parameter], _: int) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def dropped(parameters: list[nn.Parameter], _: int) -> None:
    parameters[2].grad = None


def added_by_the_last_replica(parameters: list[nn.Parameter], replica: int) -> None:
    """On one worker alone: the others have changed nothing, and must exchange again all the same."""
    if replica == LAST:
        penalties = [(parameter**2).sum() for parameter in parameters]
        torch.stack(penalties).sum().backward()  # type: ignore[no-untyped-call]


CHANGES: dict[str, Change] = {
    "written to": written_to,
    "replaced": replaced,
    "dropped": dropped,
    "added by the last replica": added_by_the_last_replica,
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


def train(strategy: ls.Strategy, before_update: Callable[[list[nn.Parameter], Any, int], None]) -> dict[str, Tensor]:
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(sgd(module.parameters()))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        ls.compute_average_loss(F.cross_entropy(replicated(x), y, reduction="none")).backward()
        replica = ls.get_replica_context().replica_id_in_sync_group
        before_update(list(replicated.parameters()), optimizer, replica)
        optimizer.step()
        optimizer.zero_grad()

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, (batch,))
    return {name: value.clone() for name, value in module.state_dict().items()}


def sum_twice(parameters: list[nn.Parameter], optimizer: Any, _: int) -> None:
    """Sums that are final, read and clipped, and asked for again."""
    optimizer.sum_gradients()
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    optimizer.sum_gradients()


class Warnings(logging.Handler):
    """Keeps what is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    handler = Warnings()
    logging.getLogger("lockstep").addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger("lockstep").removeHandler(handler)


FROZEN = {0: ("0.", "2."), 2: ("0.", "4.")}
"""From which batch on which parts are frozen."""


def freeze(module: nn.Module, batch: int) -> None:
    if batch in FROZEN:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN[batch]))


def train_frozen(strategy: ls.Strategy) -> tuple[dict[str, Tensor], list[set[int]]]:
    """The weights, and after every batch the numbers of the parameters whose gradients travel."""
    module = net()
    freeze(module, 0)
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.5))
    exchange = cast(BucketExchange, optimizer._update._exchange)
    travelled = []

    def step(batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        ls.compute_average_loss(F.cross_entropy(replicated(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, batch in enumerate(strategy.distribute_dataset(batches())):
        freeze(module, number)
        strategy.run(step, (batch,))
        travelled.append(set(exchange._bucket_of))
    return {name: value.clone() for name, value in module.state_dict().items()}, travelled


def two_passes(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The loss in two halves of its rows, whose gradients are to be added up."""
    losses = F.cross_entropy(module(x), y, reduction="none")
    return losses[::2].sum(), losses[1::2].sum()


def train_clipped_between(strategy: ls.Strategy) -> dict[str, Tensor]:
    """Two passes that add up, and between them a look at the gradients: the sums of all workers."""
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(sgd(module.parameters()))

    def step(batch: tuple[Tensor, Tensor], announced: bool) -> None:
        context = ls.get_replica_context()
        rows = context.all_reduce("sum", float(len(batch[0])))
        with replicated.no_sync() if announced else nullcontext():
            (two_passes(replicated, *batch)[0] / rows).backward()
        torch.nn.utils.clip_grad_norm_(replicated.parameters(), 0.1)
        (two_passes(replicated, *batch)[1] / rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, batch in enumerate(strategy.distribute_dataset(batches())):
        strategy.run(step, (batch, bool(number % 2)))
    return {name: value.clone() for name, value in module.state_dict().items()}


ANNOUNCED: dict[str, set[int]] = {"inside": {0, 1, 2, 3}, "outside": {0, 1, 2, 3}, "never": set()}
"""The batches whose first backward pass is in ``no_sync``, inside the step or outside it."""


def train_in_passes(strategy: ls.Strategy, name: str) -> tuple[dict[str, Tensor], list[list[tuple[float, float]]]]:
    """The weights; and of every batch, what share of the buckets had gone after the first pass and after the last."""
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(sgd(module.parameters()))
    exchange = cast(BucketExchange, optimizer._update._exchange)
    gone = []

    def backward(half: int, batch: tuple[Tensor, Tensor]) -> float:
        context = ls.get_replica_context()
        rows = context.all_reduce("sum", float(len(batch[0])))
        (two_passes(replicated, *batch)[half] / rows).backward()
        context.all_reduce("sum", 0.0)
        share = len(exchange._in_flight) / len(exchange._plan)
        context.all_reduce("sum", 0.0)
        return share

    def step(batch: tuple[Tensor, Tensor], announced: bool) -> tuple[float, float]:
        with replicated.no_sync() if announced else nullcontext():
            first = backward(0, batch)
        return first, backward(1, batch)

    for number, batch in enumerate(strategy.distribute_dataset(batches())):
        if name == "outside":
            with replicated.no_sync():
                first = strategy.local_results(strategy.run(backward, (0, batch)))
            last = strategy.local_results(strategy.run(backward, (1, batch)))
            gone.append(list(zip(first, last, strict=True)))
        else:
            gone.append(list(strategy.local_results(strategy.run(step, (batch, number in ANNOUNCED[name])))))
        strategy.run(optimizer.step)
        optimizer.zero_grad()
    assert len(exchange._plan) > 1
    return {key: value.clone() for key, value in module.state_dict().items()}, gone


def run_job() -> dict[str, Any]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    strategy = ls.MultiWorkerMirroredStrategy(communication=ls.CommunicationOptions(bucket_mb=0.0005))
    results: dict[str, Any] = {
        name: train(strategy, lambda parameters, _, replica, change=change: change(parameters, replica))
        for name, change in CHANGES.items()
    }
    results["frozen"] = train_frozen(strategy)
    results["clipped between"] = train_clipped_between(strategy)
    results["summed again"] = train(strategy, sum_twice)
    for name in ANNOUNCED:
        with kept_warnings() as messages:
            results[name] = (*train_in_passes(strategy, name), messages)
    strategy.close()
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return ls.launch(run_job, workers=2, timeout_s=120)


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_that_is_changed_before_the_update_is_exchanged_as_it_then_is(results: dict[str, Any], name: str):
    def change(module: nn.Module) -> None:
        CHANGES[name](list(module.parameters()), LAST)

    oracle.assert_close(results[name], oracle.train(net(), batches(), sgd, before_update=change).module)


def test_the_changes_are_not_all_alike(results: dict[str, Any]):
    """Else the test above would say nothing of them."""
    weights = [results[name]["0.weight"] for name in CHANGES]
    assert torch.equal(weights[0], weights[1])
    assert not any(torch.allclose(weights[0], other) for other in weights[2:])
    assert not torch.allclose(weights[2], weights[3])


def test_only_what_is_trained_travels_and_it_is_looked_at_anew_in_every_update(results: dict[str, Any]):
    weights, travelled = results["frozen"]
    module, numbers = net(), count(1)
    freeze(module, 0)
    oracle.train(
        module, batches(), lambda p: torch.optim.SGD(p, 0.5), after_update=lambda module: freeze(module, next(numbers))
    )
    oracle.assert_close(weights, module)
    assert torch.equal(weights["0.weight"], net().state_dict()["0.weight"])
    assert travelled == [{4, 5}, {4, 5}, {2, 3}, {2, 3}]


@pytest.mark.parametrize("name", ANNOUNCED)
def test_passes_that_add_up_are_one_device_s(results: dict[str, Any], name: str):
    oracle.assert_close(results[name][0], oracle.train(net(), batches(), sgd).module)


@pytest.mark.parametrize("name", ["inside", "outside"])
def test_in_no_sync_nothing_goes_and_the_next_pass_sends_all(results: dict[str, Any], name: str):
    _, gone, warnings = results[name]
    assert gone == [[(NONE, ALL)] * 2] * 4
    assert not warnings


def test_passes_that_nobody_announced_are_sent_again_and_one_warning_says_so(results: dict[str, Any]):
    _, gone, warnings = results["never"]
    assert gone == [[(ALL, ALL)] * 2] * 4
    assert len(warnings) == 1
    assert "no_sync()" in warnings[0]


def test_a_look_at_the_gradients_between_passes_is_one_device_s(results: dict[str, Any]):
    module = net()
    optimizer = sgd(module.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        # The halves of each replica's rows, as the replicas have them.
        shards = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
        (sum(two_passes(module, *shard)[0] for shard in shards) / len(x)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        (sum(two_passes(module, *shard)[1] for shard in shards) / len(x)).backward()  # type: ignore[union-attr]
        optimizer.step()

    oracle.assert_close(results["clipped between"], module)


def test_final_sums_that_are_asked_for_again_are_one_device_s(results: dict[str, Any]):
    oracle.assert_close(results["summed again"], oracle.train(net(), batches(), sgd, clip_norm=0.1).module)
