"""What a job of several workers computes for the tests to look at, and the data and networks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import lockstep as ls
from lockstep.errors import UsageError

SIZES = (9, 8, 1, 5, 2, 4)  # the small ones leave replicas, and whole workers, without rows
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
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
        "metrics": merged_metrics(strategy),
        "dropout": own_loop(strategy, "sgd", dropout=0.5, norm=True)[0],
        "twice": two_backward_passes(strategy),
        "clipped in the step": clipped_in_the_step(strategy),
        "by hand": updated_by_hand(strategy),
        "clipped outside": clipped_outside(strategy),
        "fit": fit(strategy),
        "sync batch norm": own_loop(strategy, "sgd", norm=True, sync=True),
    }
    for name in ("sgd", "adamw"):
        results[name] = own_loop(strategy, name)
    everyones = strategy.workers.all_gather_bytes("digests", digest(results).encode())
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
    if not sync:
        replicated.sync_buffers()
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


def clipped_in_the_step(strategy: ls.Strategy) -> tuple[dict[str, Tensor], list[float]]:
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(OPTIMIZERS["sgd"](module.parameters()))

    def step(batch: Batch, rows: int) -> Tensor:
        x, y, _ = batch
        ls.compute_average_loss(per_example(replicated(x), y), global_batch_size=rows).backward()
        norm = nn.utils.clip_grad_norm_(replicated.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    norms = []
    for batch, (x, _, _) in zip(strategy.distribute_dataset(batches()), batches(), strict=True):
        norms.append(strategy.local_results(strategy.run(step, (batch, len(x))))[-1].item())
    return {name: value.clone() for name, value in module.state_dict().items()}, norms


def clipped_outside(strategy: ls.Strategy) -> str:
    """Of gradients of which each worker has its own replicas' share alone."""
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(OPTIMIZERS["sgd"](module.parameters()))

    def backward() -> None:
        per_example(replicated(batches()[0][0]), batches()[0][1]).sum().backward()

    strategy.run(backward)
    optimizer.zero_grad(set_to_none=False)
    strategy.run(backward)
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    try:
        optimizer.step()
    except UsageError as error:
        return str(error)
    return "stepped"


def updated_by_hand(strategy: ls.Strategy) -> dict[str, Tensor]:
    module = net()
    replicated = strategy.mirror(module)

    def step(batch: Batch, rows: int) -> None:
        x, y, _ = batch
        replicated.zero_grad()
        ls.compute_average_loss(per_example(replicated(x), y), global_batch_size=rows).backward()
        with torch.no_grad():
            for each in replicated.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad

    for batch, (x, _, _) in zip(strategy.distribute_dataset(batches()), batches(), strict=True):
        strategy.run(step, (batch, len(x)))
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
            "own": part.detach(),
            "number": number,
        }

    results = strategy.run(step)
    first = strategy.local_results(results["number"])[0]
    numbers = ls.PerReplica([torch.arange(float(first + local)) for local in range(len(strategy.devices))])
    return {
        "step": {name: strategy.local_results(value)[-1] for name, value in results.items()},
        "sum": strategy.reduce("sum", results["number"]),
        "mean": strategy.reduce("mean", results["number"]),
        "mean of tensors": strategy.reduce("mean", results["own"]),
        "plain": strategy.reduce("sum", 1),
        "mean over axis": strategy.reduce("mean", numbers, axis=0),
        "gather": strategy.gather(numbers, axis=0),
        "bools": strategy.reduce("sum", ls.PerReplica([torch.tensor([True, False])] * len(strategy.devices))),
    }


def variables(strategy: ls.Strategy) -> dict[str, Any]:
    summed = strategy.variable(float(strategy.workers.index), aggregation="sum")
    first = strategy.variable(0, aggregation="only_first")
    counter = strategy.variable(0, aggregation="sum", synchronization="on_read")
    own = strategy.variable(0, aggregation="only_first", synchronization="on_read")

    def step() -> None:
        context = ls.get_replica_context()
        number = context.replica_id_in_sync_group
        summed.assign_add(torch.tensor(float(number)))
        first.assign(number + 5)
        counter.assign_add(number)
        own.assign(number + 3)

    strategy.run(step)
    read = {"summed": float(summed), "first": int(first), "counter": int(counter), "own": int(own)}
    read["reduced"] = int(strategy.reduce("sum", counter))
    counter.assign(13)
    return read | {"assigned": int(counter)}


def merged_metrics(strategy: ls.Strategy) -> dict[str, Any]:
    error, values = strategy.mirror(MeanSquaredError()), strategy.mirror(CatMetric())

    def step() -> float:
        context = ls.get_replica_context()
        number = context.replica_id_in_sync_group
        own = torch.full((number,), float(number))
        error.update(own, torch.zeros(number))
        values.update(own)
        return float(error.compute())

    inside = strategy.local_results(strategy.run(step))
    return {
        "inside": sorted(set(inside)),
        "error": float(error.compute()),
        "values": values.compute().reshape(-1).tolist(),
    }


def digest(value: Any) -> str:
    """Of all the bits in a structure, but for what is each replica's own."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves({k: v for k, v in value.items() if k != "collectives"}):
        found.update(leaf.contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return found.hexdigest()
