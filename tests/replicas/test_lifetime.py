"""Threads end with their strategy, with the interpreter, and at Ctrl-C; seen from outside, in real processes."""

from __future__ import annotations

import gc
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy
from torch.utils.data import DataLoader

from lockstep.config import LogicalDevice
from lockstep.strategies.mirrored import MirroredStrategy

SOON_S = 20.0  # from signal to exception; a second where nothing else runs
PROGRAM = """
import threading, torch, lockstep as ls
(cpu,) = ls.config.list_physical_devices("CPU")
ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 4)
strategy = ls.MirroredStrategy(seed=0)
waits = {
    "loop": lambda context: None,
    "collective": lambda context: context.all_reduce("sum", 1),
    "torch": lambda context: torch.ones(9).sum(),
}
for name, wait in waits.items():
    running = []
    def step():
        context = ls.get_replica_context()
        running.append(context)
        if len(running) == min(2, torch.get_num_threads()):  # with fewer cores than replicas the others wait for a turn
            print(name, flush=True)
        while True:
            wait(context)
    try:
        strategy.run(step)
    except KeyboardInterrupt:
        total = strategy.reduce("sum", strategy.run(lambda: torch.ones(())))
        print("interrupted, and", int(total), "replicas go on", flush=True)
strategy.close()
print(*(thread.name for thread in threading.enumerate()), flush=True)
never_closed = ls.MirroredStrategy(seed=0)
never_closed.run(lambda: torch.ones(1))
print("last line", flush=True)
"""


def replica_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lockstep-replica")]


def test_ctrl_c_ends_a_run_and_no_thread_keeps_the_interpreter(python: Callable[..., subprocess.Popen[str]]):
    process = python("-c", PROGRAM)
    lines = iter(process.stdout.readline, "")
    for name in ("loop", "collective", "torch"):
        assert next(lines) == f"{name}\n"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert next(lines) == "interrupted, and 4 replicas go on\n"
        assert time.monotonic() - began < SOON_S
    assert [next(lines), next(lines)] == ["MainThread\n", "last line\n"]
    began = time.monotonic()
    _, err = process.communicate(timeout=60)

    assert time.monotonic() - began < SOON_S
    assert (process.returncode, err) == (0, "")


def test_threads_end_with_close(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    assert len(replica_threads()) == 3
    strategy.close()
    assert replica_threads() == []


@pytest.mark.parametrize("fails", [False, True])
def test_threads_end_when_the_strategy_is_collected(fails: bool, split_cpu: Callable[[int], tuple[LogicalDevice, ...]]):
    strategy = MirroredStrategy(split_cpu(2), seed=0)
    module: Any = strategy.mirror(torch.nn.Linear(1, 1))
    if fails:
        with pytest.raises(RuntimeError):
            strategy.run(module, (torch.ones(1, 2),))
    else:
        strategy.run(module, (torch.ones(1, 1),))

    assert len(replica_threads()) == 2
    del strategy
    gc.collect()
    assert len(replica_threads()) == 2  # the module needs it
    module = None
    gc.collect()
    assert replica_threads() == []


def test_a_data_loader_with_forked_workers_beside_a_strategy(make_strategy: MakeStrategy):
    strategy = make_strategy(4)
    data = list(torch.arange(24.0).split(1))
    loader: DataLoader[torch.Tensor] = DataLoader(data, batch_size=6, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    total = 0.0
    for _ in range(2):
        for batch in strategy.distribute_dataset(loader):
            total += float(strategy.reduce("sum", strategy.run(torch.sum, (batch,))))
    assert total == 2 * sum(range(24))
