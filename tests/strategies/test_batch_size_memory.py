"""find_batch_size against real allocations, each in a process of its own.

What a process has resident depends on all that ran in it before: gaps in the heap take a step's memory without a trace.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.replicas.cpu.memory import give_back_freed_memory, resident_mb

MB = 2**20
Shard = tuple[Tensor, Tensor]
Alone = Callable[..., Any]


@pytest.fixture
def alone(start_worker: Any) -> Iterator[Alone]:
    """``alone(function, *arguments)``: what a function of this file tells in a new process."""
    with ExitStack() as stack:

        def call(function: Callable[..., None], *arguments: Any) -> Any:
            process = stack.enter_context(closing(start_worker(__file__, function.__name__, arguments, {})))
            code = process.end()
            assert code == 0, process.errors
            return json.loads(process.output)

        yield call


def tell(value: Any) -> None:
    sys.stdout.write(json.dumps(value))


def mirrored(replicas: int) -> ls.MirroredStrategy:
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
    return ls.MirroredStrategy()


def make_batch(rows: int) -> Shard:
    return torch.zeros(rows, 3, 4, 4), torch.zeros(rows, dtype=torch.int64)


def together() -> None:
    """What the replicas hold here, they hold at the same time."""
    context = ls.get_replica_context()
    assert context is not None
    context.all_reduce("sum", 1.0)


def a_megabyte_a_row(shard: Shard) -> None:
    held = torch.ones(len(shard[0]), MB // 4)
    together()
    del held


def fill_the_budget(replicas: int) -> None:
    strategy = mirrored(replicas)
    strategy.find_batch_size(a_megabyte_a_row, make_batch, 4, limit=8)  # what the first steps of a process load
    before = resident_mb()
    found = strategy.find_batch_size(a_megabyte_a_row, make_batch, 16, memory_mb=before + 120)
    tell({"found": found, "kept": resident_mb() - before})


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_rows_of_known_size_fill_the_budget_and_the_memory_comes_back(replicas: int, alone: Alone):
    result = alone(fill_the_budget, replicas)

    assert result["found"] % replicas == 0
    assert 120 * 0.7 <= result["found"] <= 120 * 1.2  # too few cost speed, too many the process
    assert result["kept"] < 60  # of 120; gaps in the heap may hold blocks of 16


def stay_below() -> None:
    seen: list[int] = []

    def step(shard: Shard) -> None:
        seen.append(len(shard[0]))
        a_megabyte_a_row(shard)

    mirrored(2).find_batch_size(step, make_batch, 10**9, memory_mb=resident_mb() + 100)
    tell(max(seen) * 2)


def test_no_size_is_run_that_would_break_the_budget(alone: Alone):
    assert alone(stay_below) <= 105  # 10**9 rows would have been the end of the process


def exceed() -> None:
    def step(shard: Shard) -> None:
        held = torch.ones(50 * MB // 4)
        together()
        del held

    with pytest.raises(ls.errors.DeviceMemoryError) as raised:
        mirrored(2).find_batch_size(step, make_batch, 64, memory_mb=resident_mb() + 40)
    tell(str(raised.value))


def test_a_smallest_batch_above_the_budget_is_named_with_the_budget(alone: Alone):
    assert re.search(r"a batch of 2 took this process to [\d,]+ MB of a budget of [\d,]+ MB", alone(exceed))


def make_state() -> None:
    strategy = mirrored(1)
    network = nn.Linear(8 * MB // 4, 2, bias=False)  # 16 MB, and twice as much for Adam
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.Adam(network.parameters(), fused=True))

    def step(shard: Shard) -> None:
        model(torch.ones(len(shard[0]), 8 * MB // 4)).sum().backward()  # 8 MB a row
        optimizer.step()
        optimizer.zero_grad()

    strategy.find_batch_size(step, make_batch, 1, limit=1)
    before = resident_mb()
    found = strategy.find_batch_size(step, make_batch, 1, memory_mb=before + 400)
    give_back_freed_memory()
    kept = resident_mb() - before
    tell({"found": found, "kept": kept, "state": len(optimizer.state_dict()["state"])})


def test_a_first_step_that_makes_optimizer_state_counts_what_the_second_takes(alone: Alone):
    result = alone(make_state)

    # 16 of the copy of the weights, 16 of gradients, 32 of state, and 8 a row; a gap in the heap may hold 16 more
    assert (400 - 64) / 8 * 0.75 <= result["found"] <= (400 - 64) / 8 + 2
    assert result["kept"] < 48  # of 64 and more; gaps in the heap, as above, have held 43
    assert result["state"] == 0
