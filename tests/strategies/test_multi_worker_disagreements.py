"""Workers that were not started alike: found at the start or at the step, on all of them, and named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import ClusterError

pytestmark = [pytest.mark.workers, pytest.mark.slow]

STEPS = 4
NAMES = [rf"worker {worker} \(127\.0\.0\.1:\d+\)" for worker in range(2)]
ROWS = 8

Batch = tuple[Tensor, Tensor]


# What the workers run.


def joined(seed: int = 7) -> ls.MultiWorkerMirroredStrategy:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    options = ls.CommunicationOptions(lost_after_s=3)
    return ls.MultiWorkerMirroredStrategy(seed=seed, communication=options, timeout_s=60)


def net(hidden: int = 8, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3, bias=bias))


def batches(steps: int = STEPS, seed: int = 0, rows: int = ROWS) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(rows, 4, generator=random), torch.randint(3, (rows,), generator=random)) for _ in range(steps)]


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def own_seed(index: int) -> None:
    joined(seed=7 + index)


def other_programs(index: int) -> None:
    """What is compared before anything is trained: the job goes on after each of these errors."""
    strategy = joined()
    told("layer", lambda: strategy.mirror(net(hidden=8 + index)))
    told("parameter", lambda: strategy.mirror(net(bias=not index)))
    module = net()
    strategy.mirror(module)
    told("optimizer", lambda: strategy.mirror(torch.optim.SGD(module.parameters(), 0.1 + index)))
    model = compiled(strategy, net())
    told("epochs", lambda: model.fit(batches(), epochs=1 + index, verbose=0))
    told("length", lambda: model.fit(batches(STEPS - index), verbose=0))
    strategy.close()


def told(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except ClusterError as error:
        sys.stdout.write(f"{name}: {error}\n")


def compiled(strategy: ls.Strategy, module: nn.Module) -> ls.Model:
    with strategy.scope():
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), per_example)
    return model


def data_in_another_order(index: int) -> None:
    order = slice(None, None, -1 if index else 1)
    compiled(joined(), net()).fit(batches()[order], verbose=0)


def another_batch(index: int) -> None:
    data = batches()
    if index:
        data[2] = batches(seed=5)[2]
    own_loop(joined(), data)


def rows_of_another_number(index: int) -> None:
    own_loop(joined(), batches(rows=ROWS - index))


def data_that_ends_earlier(index: int) -> None:
    def data() -> Iterator[Batch]:
        yield from batches(STEPS - index)

    compiled(joined(), net()).fit(data(), verbose=0)


def own_loop(
    strategy: ls.Strategy,
    data: list[Batch],
    *,
    asks: bool = True,
    before_each: Callable[[int, nn.Module, torch.optim.Optimizer], object] = lambda *_: None,
) -> None:
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(batch: Batch) -> Tensor:
        x, y = batch
        loss = ls.compute_average_loss(per_example(replicated(x), y), global_batch_size=ROWS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number, batch in enumerate(strategy.distribute_dataset(data)):
        before_each(number, module, optimizer)
        losses = strategy.run(step, (batch,))
        if asks:
            strategy.reduce("sum", losses)


def a_collective_left_out(index: int) -> None:
    own_loop(joined(), batches(), asks=index == 0)


def a_rate_of_its_own(index: int) -> None:
    def change(number: int, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if index and number == 2:
            optimizer.param_groups[0]["lr"] *= 0.5

    own_loop(joined(), batches(), before_each=change)


def a_layer_frozen_on_one(index: int) -> None:
    def change(number: int, module: nn.Module, _: torch.optim.Optimizer) -> None:
        if index and number == 2:
            next(module.children()).requires_grad_(False)

    own_loop(joined(), batches(), before_each=change)


def weights_scaled_on_one(index: int) -> None:
    def change(number: int, module: nn.Module, _: torch.optim.Optimizer) -> None:
        if index and number == 2:
            for weight in module.parameters():
                weight.data *= 0.5

    own_loop(joined(), batches(), before_each=change)


def a_schedule_of_all(index: int) -> None:
    def change(number: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        for weight in module.parameters():
            weight.data *= 0.9
        if number == 2:
            next(module.children()).requires_grad_(False)

    own_loop(joined(), batches(), before_each=change)


def evaluate_beside_fit(index: int) -> None:
    model = compiled(joined(), net())
    if index:
        model.evaluate(batches(), verbose=0)
    else:
        model.fit(batches(), verbose=0)


def a_weight_changed_by_hand(index: int) -> None:
    module = net()
    strategy = joined()

    def change(batch: int, logs: dict[str, float]) -> None:
        if index and batch == 1:
            with torch.no_grad():
                module[0].weight[-1, -1] += 1e-3  # what an update does not look at; the end of the epoch does

    compiled(strategy, module).fit(batches(), verbose=0, callbacks=[ls.LambdaCallback(on_train_batch_end=change)])


def a_weight_changed_in_a_step(index: int) -> None:
    strategy, module = joined(), net()
    replicated = strategy.mirror(module)

    def step() -> None:
        with torch.no_grad():
            next(iter(replicated.parameters())).mul_(0.5 + index)

    strategy.run(step)
    strategy.reduce("sum", 1)


def a_plain_module_of_each_worker(index: int) -> None:
    torch.set_num_threads(1)
    strategy = ls.MultiWorkerMirroredStrategy(seed=7, timeout_s=60)
    module = net()

    def step(batch: Batch) -> None:
        per_example(module(batch[0]), batch[1]).mean().backward()

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, (batch,))


# What the tests see of them.


@pytest.fixture(scope="module")
def messages(start_module_job: Any) -> list[dict[str, str]]:
    job = start_module_job(other_programs, "index")
    assert [worker.end() for worker in job] == [0, 0], [worker.errors for worker in job]
    return [dict(line.split(": ", 1) for line in worker.output.splitlines()) for worker in job]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("layer", r"the workers disagree about the model: {0} has .*\(8, 4\).*, {1} has .*\(9, 4\).*; run the same"),
        ("parameter", r"the workers disagree about the model: {0} has .*2\.bias.*, {1} has nothing more"),
        ("optimizer", r"the workers disagree about the optimizer: {0} has .*lr=0\.1.*, {1} has .*lr=1\.1"),
        ("epochs", "the workers disagree about how to train: {0} has epochs=1, {1} has epochs=2"),
        ("length", "the workers disagree about how to train: {0} has steps=4, {1} has steps=3"),
    ],
)
def test_other_programs_are_found_before_training(messages: list[dict[str, str]], name: str, error: str):
    assert re.search(error.format(*NAMES), messages[0][name]), messages[0]
    assert messages[0] == messages[1]


OTHER_DATA = r"CollectiveError: {1} .* other data, .* weights, optimizer settings .*, than {0} before '{call}'"


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (own_seed, "ClusterError: the workers disagree about the seed: {0} has seed=7, {1} has seed=8"),
        (data_in_another_order, OTHER_DATA.replace("{call}", "optimizer update")),
        (another_batch, OTHER_DATA.replace("{call}", "optimizer update")),
        (rows_of_another_number, OTHER_DATA.replace("{call}", "optimizer update")),
        (a_rate_of_its_own, OTHER_DATA.replace("{call}", "optimizer update")),
        (a_layer_frozen_on_one, OTHER_DATA.replace("{call}", "optimizer update")),
        (weights_scaled_on_one, OTHER_DATA.replace("{call}", "optimizer update")),
        (data_that_ends_earlier, "{0} is at .*; {1} is at 'the end of the data, after 3 global batches'"),
        (a_collective_left_out, r"{0} is at 'reduce.*\(test_.*:\d+ in own_loop\).*; {1} is at 'optimizer update'"),
        (evaluate_beside_fit, "did not meet at the same call: {0} is at 'agree .*; {1} is at "),
        (a_weight_changed_in_a_step, "CollectiveError: {1} .* than {0} before 'reduce"),
        (a_plain_module_of_each_worker, "UsageError: .*mirror"),
        (a_weight_changed_by_hand, OTHER_DATA.replace("{call}", "comparison of the weights")),
    ],
)
def test_workers_that_part_ways_are_named(start_job: Any, function: Callable[[int], None], error: str):
    job = start_job(function, "index")
    for worker in job:
        assert worker.end() == 1
        assert re.search(error.format(*NAMES), worker.error), worker.error


def test_what_all_workers_change_alike_is_no_disagreement(start_job: Any):
    assert [worker.end() for worker in start_job(a_schedule_of_all, "index")] == [0, 0]
