"""Ours as a hand-written loop: the CPU split into logical devices, ``mirror``, ``run``, ``optimizer.step``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import lockstep as ls
from benchmarks.contenders.plain import trained_parameters
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Batch, Trial, Workload


def split_cpu(shares: int) -> list[str]:
    """Splits the CPU into logical devices and gives their names."""
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration() for _ in range(shares)])
    return [device.name for device in ls.config.list_logical_devices("CPU")]


def run_replicas(trial: Trial, seat: Seat, laps: Laps) -> None:
    """Trains with a MirroredStrategy of ``trial.contender.shares`` replicas on all cores."""
    torch.set_num_threads(trial.cores)
    train_replicas(trial.workload, trial.workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


def train_replicas(workload: Workload, batches: Iterable[Batch], laps: Laps, *, replicas: int) -> None:
    """The hand-written loop with a MirroredStrategy.

    Args:
        workload: the work; its count is that of the batches.
        batches: global batches.
        laps: the stopwatch.
        replicas: among how many each batch is divided; they share the intra-op threads that the caller has set.
    """
    torch.manual_seed(0)
    train_with(ls.MirroredStrategy(split_cpu(replicas)), workload, batches, laps)


def train_with(strategy: ls.Strategy, workload: Workload, batches: Iterable[Batch], laps: Laps) -> None:
    """The hand-written loop; the strategy is closed at its end.

    Exchange and update are told apart by the replicas' clocks: from the arrival of the last replica at
    ``optimizer.step`` to the moment when all have left it. What the others wait for the last one is no exchange.

    Args:
        strategy: which runs the steps; the caller has seeded torch.
        workload: the work; its count is that of the batches.
        batches: global batches.
        laps: the stopwatch.
    """
    module = strategy.mirror(workload.make_module())
    laps.trained = trained_parameters(module)
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True))

    def step(x: Any, y: Tensor) -> tuple[Tensor, float, float]:
        optimizer.zero_grad()
        total, _ = workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
        loss = total / workload.count
        loss.backward()  # type: ignore[no-untyped-call]
        arrived = time.perf_counter()
        optimizer.step()
        return loss.detach(), arrived, time.perf_counter()

    module.train()
    for x, y in strategy.distribute_dataset(batches):
        losses, arrivals, departures = strategy.run(step, args=(x, y))
        exchange_s = max(strategy.local_results(departures)) - max(strategy.local_results(arrivals))
        own = sum(map(float, strategy.local_results(losses)))  # DDP's loop does not sum over processes either
        laps.lap(own * strategy.workers.size, exchange_s)
    strategy.close()
