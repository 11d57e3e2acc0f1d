"""Workers of two replicas each, real processes over gloo, against a hand-written loop on one device.

One job of each layout computes everything; the tests look at what its chief returned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import lockstep as ls

pytestmark = pytest.mark.workers

SIZES = (9, 8, 1, 5, 2, 4)  # the small ones leave replicas, and whole workers, without rows
LAYOUTS = {"2 workers x 2": (2, 2), "3 workers x 2": (3, 2), "2 workers x 1": (2, 1)}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
}
Batch = tuple[Tensor, Tensor, Tensor]


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 4, generator=random, dtype=torch.float64),
            torch.randint(3, (n,), generator=random),
            torch.rand(n, generator=random, dtype=torch.float64) * 2,
        )
        for n in SIZES
    ]


def normable() -> list[Batch]:
    """Those that batch norm takes on one device: it refuses a single row."""
    return [batch for batch in batches() if len(batch[0]) > 1]


def net(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(16) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 16), middle, nn.Dropout(dropout), nn.Linear(16, 3)).double()


def metrics() -> dict[str, Any]:
    return {"accuracy": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3)}


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


# What a job computes.


def run_job(replicas: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
    # What a worker draws before it is in the job must not matter.
    torch.manual_seed(100 + len(ls.config.list_logical_devices("CPU")))
    options = ls.CommunicationOptions(bucket_mb=0.0005, lost_after_s=60)
    strategy = ls.MultiWorkerMirroredStrategy(seed=7, communication=options)
    results: dict[str, Any] = {
        "replicas": strategy.num_replicas_in_sync,
        "collectives": collectives(strategy),
        "variables": variables(strategy),
        "dropout": own_loop(strategy, "sgd", dropout=0.5, norm=True)[0],
        "twice": two_backward_passes(strategy),
        "fit": fit(strategy),
        "sync batch norm": own_loop(strategy, "sgd", norm=True, sync=True),
    }
    for name in OPTIMIZERS:
        results[name] = own_loop(strategy, name)
    everyones = strategy.workers.exchange_bytes("digests", digest(results).encode())
    results["all alike"] = len(set(everyones)) == 1
    strategy.close()
    return results


def own_loop(
    strategy: ls.Strategy, name: str, *, dropout: float = 0.0, norm: bool = False, sync: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    module = net(dropout, norm)
    replicated = strategy.mirror(module, sync_batchnorm=sync)
    optimizer = strategy.mirror(OPTIMIZERS[name](module.parameters()))

    def step(batch: Batch, rows: int) -> Tensor:
        x, y, _ = batch
        loss = ls.compute_average_loss(per_example(replicated(x), y), global_batch_size=rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    data = normable() if norm else batches()
    losses = [
        strategy.reduce("sum", strategy.run(step, (batch, len(x)))).item()
        for batch, (x, _, _) in zip(strategy.distribute_dataset(data), data, strict=True)
    ]
    return {name: value.clone() for name, value in replicated.state_dict().items()}, losses


def two_backward_passes(strategy: ls.Strategy) -> dict[str, Tensor]:
    """Gradients of two batches added up by hand before each update; a worker without rows does no backward pass."""
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(OPTIMIZERS["sgd"](module.parameters()))

    def backward(batch: Batch) -> None:
        x, y, _ = batch
        if len(x):
            per_example(replicated(x), y).sum().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for index, batch in enumerate(strategy.distribute_dataset(batches())):
        strategy.run(backward, (batch,))
        if index % 2:
            strategy.run(update)
    return {name: value.clone() for name, value in module.state_dict().items()}


def fit(strategy: ls.Strategy) -> dict[str, Any]:
    with strategy.scope():
        module = net()
        model = ls.Model(module)
        model.compile(
            OPTIMIZERS["adamw"](module.parameters()), per_example, metrics=metrics(), accumulate=2, clip_norm=0.5
        )
        seen: list[dict[str, float]] = []
        keep = ls.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
        history = model.fit(batches(), validation_data=batches()[:2], epochs=2, verbose=0, callbacks=[keep])
        return {
            "history": history.history,
            "examples": [timing.examples for timing in history.timing],
            "batches": seen,
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "evaluate": model.evaluate(batches(), verbose=0),
            "predict": model.predict([x for x, _, _ in batches()]),
        }


def collectives(strategy: ls.Strategy) -> dict[str, Any]:
    def step() -> dict[str, Any]:
        context = ls.get_replica_context()
        assert context is not None
        number = context.replica_id_in_sync_group
        x = torch.full((2,), float(number + 1), requires_grad=True)
        total = context.all_reduce("sum", x * x)
        gathered = context.all_gather(torch.full((number, 1), number), 0)
        part = torch.full((1,), float(number), requires_grad=True)
        (context.all_gather(part, 0) * torch.arange(context.num_replicas_in_sync)).sum().backward()
        (total * (number + 1)).sum().backward()
        return {
            "total": total.detach(),
            "mean": context.all_reduce("mean", number),
            "gathered": gathered,
            "gradient": x.grad,
            "gather gradient": part.grad,
            "number": number,
        }

    results = strategy.run(step)
    first = strategy.local_results(results["number"])[0]
    numbers = ls.PerReplica([torch.arange(float(first + local)) for local in range(len(strategy.devices))])
    return {
        "step": {name: strategy.local_results(value)[-1] for name, value in results.items()},
        "sum": strategy.reduce("sum", results["number"]),
        "plain": strategy.reduce("sum", 1),
        "mean over axis": strategy.reduce("mean", numbers, axis=0),
        "gather": strategy.gather(numbers, axis=0),
        "bools": strategy.reduce("sum", ls.PerReplica([torch.tensor([True, False])] * len(strategy.devices))),
    }


def variables(strategy: ls.Strategy) -> dict[str, Any]:
    summed = strategy.variable(float(strategy.workers.index), aggregation="sum")
    first = strategy.variable(0, aggregation="only_first")
    counter = strategy.variable(0, aggregation="sum", synchronization="on_read")

    def step() -> None:
        context = ls.get_replica_context()
        assert context is not None
        number = context.replica_id_in_sync_group
        summed.assign_add(torch.tensor(float(number)))
        first.assign(number + 5)
        counter.assign_add(number)

    strategy.run(step)
    read = {"summed": float(summed), "first": int(first), "counter": int(counter)}
    counter.assign(12)
    return read | {"assigned": int(counter)}


def digest(value: Any) -> str:
    """Of all the bits in a structure, but for what is each replica's own."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves({k: v for k, v in value.items() if k != "collectives"}):
        found.update(leaf.contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return found.hexdigest()


# The same on one device, by hand.


def one_device(name: str, norm: bool = False) -> tuple[nn.Module, list[float]]:
    module, losses = net(norm=norm), []
    optimizer = OPTIMIZERS[name](module.parameters())
    for x, y, _ in normable() if norm else batches():
        optimizer.zero_grad()
        loss = per_example(module(x), y).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, losses


def one_device_fit() -> tuple[nn.Module, list[float], list[float]]:
    module = net()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    means, accuracies = [], []
    for _ in range(2):
        total, count, right, rows_seen = 0.0, 0, 0, 0
        for index, (x, y, weight) in enumerate(batches()):
            outputs = module(x)
            loss = (per_example(outputs, y) * weight).sum()
            loss.backward()
            total, count = total + loss.item(), count + len(x)
            right, rows_seen = right + int((outputs.argmax(1) == y).sum()), rows_seen + len(x)
            if index % 2:
                cycle = SIZES[index - 1] + SIZES[index]
                for parameter in module.parameters():
                    parameter.grad /= cycle
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        means.append(total / count)
        accuracies.append(right / rows_seen)
    return module, means, accuracies


@cache
def job(layout: str) -> dict[str, Any]:
    workers, replicas = LAYOUTS[layout]
    return ls.launch(run_job, workers=workers, args=(replicas,), timeout_s=150)


@pytest.fixture(scope="module", params=LAYOUTS)
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    return job(request.param)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_on_workers_is_the_loop_on_one_device(result: dict[str, Any], name: str):
    module, losses = one_device(name)

    assert_close(result[name][1], losses)
    assert_close(result[name][0], module.state_dict())


def test_synchronised_batch_norm_is_that_of_one_device(result: dict[str, Any]):
    module, losses = one_device("sgd", norm=True)

    assert_close(result["sync batch norm"][1], losses)
    assert_close(result["sync batch norm"][0], module.state_dict())


def test_gradients_that_are_added_up_by_hand_are_exchanged_whole(result: dict[str, Any]):
    module = net()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    for index, (x, y, _) in enumerate(batches()):
        per_example(module(x), y).sum().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    assert_close(result["twice"], module.state_dict())


def test_fit_is_the_loop_on_one_device(result: dict[str, Any]):
    module, means, accuracies = one_device_fit()

    assert_close(result["fit"]["weights"], module.state_dict())
    assert_close(result["fit"]["history"]["loss"], means)
    assert result["fit"]["history"]["accuracy"] == pytest.approx(accuracies, abs=1e-7)  # torchmetrics' is float32
    assert result["fit"]["examples"] == [sum(SIZES)] * 2


def test_callbacks_hear_the_loss_and_metrics_of_all_workers(result: dict[str, Any]):
    last = result["fit"]["batches"][-1]

    assert last["loss"] == pytest.approx(result["fit"]["history"]["loss"][-1])
    assert last["f1"] == pytest.approx(result["fit"]["history"]["f1"][-1])


def test_evaluate_counts_every_example_once(result: dict[str, Any]):
    module, _, _ = one_device_fit()
    x, y = torch.cat([x for x, _, _ in batches()]), torch.cat([y for _, y, _ in batches()])
    weight = torch.cat([weight for _, _, weight in batches()])
    expected = {"loss": ((per_example(module(x), y) * weight).sum() / len(x)).item()}
    for name, metric in metrics().items():
        expected[name] = metric(module(x), y).item()

    assert_close(result["fit"]["evaluate"], expected)


def test_predict_gives_all_rows_in_the_order_of_the_data(result: dict[str, Any]):
    module, _, _ = one_device_fit()

    assert_close(result["fit"]["predict"], module(torch.cat([x for x, _, _ in batches()])).detach())


def test_collectives_reach_all_replicas(result: dict[str, Any]):
    count, found = result["replicas"], result["collectives"]
    numbers = torch.arange(count)
    local = found["step"]["number"]

    assert_close(found["step"]["total"], torch.full((2,), float(((numbers + 1) ** 2).sum())))
    assert found["step"]["mean"] == pytest.approx((count - 1) / 2)
    assert found["step"]["gathered"].flatten().tolist() == [n for n in range(count) for _ in range(n)]
    assert_close(found["step"]["gradient"], torch.full((2,), 2.0 * (local + 1) * float((numbers + 1).sum())))
    assert_close(found["step"]["gather gradient"], torch.tensor([float(local * count)]))
    assert found["sum"] == count * (count - 1) / 2
    assert found["plain"] == count
    everyones = torch.cat([torch.arange(float(n)) for n in range(count)])
    assert_close(found["gather"], everyones)
    assert_close(found["mean over axis"], everyones.mean())
    assert found["bools"].tolist() == [count, 0]


def test_variables_are_reduced_over_all_replicas_and_begin_with_the_chief_s_value(result: dict[str, Any]):
    total = result["replicas"] * (result["replicas"] - 1) / 2

    assert result["variables"] == {"summed": total, "first": 5, "counter": total, "assigned": 12}


def test_all_workers_have_the_same_bits(result: dict[str, Any]):
    assert result["all alike"]


def test_the_same_layout_again_gives_the_same_bits_dropout_included():
    first, again = job("2 workers x 2"), run_again("2 workers x 2")

    assert digest(first) == digest(again)


def run_again(layout: str) -> dict[str, Any]:
    workers, replicas = LAYOUTS[layout]
    return ls.launch(run_job, workers=workers, args=(replicas,), timeout_s=150)
