"""Ours on many workers: a MultiWorkerMirroredStrategy in every process, and the loop of one process as it is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import lockstep as ls
from benchmarks.processes import ProcessInfo
from benchmarks.step_timer import StepTimer
from benchmarks.trial import TRIAL_LIMIT_S, Batch, Layout, Trial, Workload
from lockstep.collectives.communicator import Compression
from lockstep.data.sharding import split_batch
from lockstep.errors import ConfigError
from lockstep.replicas.cpu.memory import keep_freed_memory
from lockstep.train.callbacks.base import Callback
from lockstep.train.model import Model

_LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def memory_format(layout: Layout) -> torch.memory_format:
    """The name that torch has for a layout.

    Raises:
        ConfigError: "auto", which only a strategy understands, or "framework", which is not torch's.
    """
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout={layout!r} is for our strategies; a plain loop takes one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout]


def laid_out(batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """The batches with their pictures in the memory format; other tensors stay as they are."""
    target = memory_format(layout)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=target) if tensor.dim() == 4 else tensor

    return [tree_map_only(Tensor, convert, batch) for batch in batches]


def trained_parameters(module: nn.Module) -> int:
    """How many numbers an optimizer changes: frozen parameters do not count, tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def train(trial: Trial, module: nn.Module, batches: Sequence[Batch], laps: StepTimer, *, divisor: float) -> None:
    """The usual loop: clear, forward, backward, update.

    Args:
        trial: the work.
        module: in training mode, wrapped for whoever trains it.
        batches: this process's part of each global batch.
        laps: the stopwatch.
        divisor: of the summed loss.
    """
    workload = trial.workload
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True)
    laps.trained = trained_parameters(module)
    for x, y in batches:
        optimizer.zero_grad()
        total, _ = workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
        loss = total / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        laps.lap(loss.item())


def train_alone(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """One process, the whole batch, all cores as intra-op threads."""
    torch.set_num_threads(trial.cores)
    torch.manual_seed(0)
    layout = trial.contender.layout
    module = trial.workload.make_module().train().to(memory_format=memory_format(layout))  # type: ignore[call-overload]
    batches = laid_out(trial.workload.make_batches(laps.total), layout)
    train(trial, module, batches, laps, divisor=trial.workload.count)


_SWITCH = "forward_sync_buffers" if torch.__version__ >= (2, 13) else "broadcast_buffers"  # type: ignore[operator]
NO_BROADCAST: dict[str, Any] = {_SWITCH: False}
"""Buffers stay each process's own. torch 2.13 has given the switch another name."""
SETTINGS = "gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"


def train_ddp(trial: Trial, seat: ProcessInfo, laps: StepTimer, *, halved: bool = False) -> None:
    """One of ``trial.contender.processes`` processes. All of them must call it: they meet at ``seat.store``.

    DDP averages the processes' gradients, so each divides its sum by its part of the count.

    Args:
        trial: the work.
        seat: this process's.
        laps: the stopwatch.
        halved: whether gradients travel in half precision, by torch's own hook. It is the one for fp16, which needs
            small gradients: DDP refuses the one for bf16 over gloo.
    """
    torch.set_num_threads(trial.threads_per_process)
    torch.manual_seed(0)
    world, layout = trial.contender.processes, trial.contender.layout
    dist.init_process_group("gloo", init_method=f"file://{seat.store}", rank=seat.rank, world_size=world)
    module = trial.workload.make_module().train().to(memory_format=memory_format(layout))  # type: ignore[call-overload]
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True, **NO_BROADCAST)
    if halved:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    shards = [split_batch(batch, world)[seat.rank] for batch in trial.workload.make_batches(laps.total)]
    train(trial, wrapped, laid_out(shards, layout), laps, divisor=trial.workload.count / world)
    dist.destroy_process_group()


def train_alone_keeping(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """The single process, keeping freed memory."""
    keep_freed_memory()
    train_alone(trial, seat, laps)


def train_ddp_keeping(trial: Trial, seat: ProcessInfo, laps: StepTimer, *, halved: bool = False) -> None:
    """One of the DDP processes, keeping freed memory; see ``train_ddp``. All of them must call it."""
    keep_freed_memory()
    train_ddp(trial, seat, laps, halved=halved)


def split_cpu(shares: int) -> list[str]:
    """Splits the CPU into logical devices and gives their names."""
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration() for _ in range(shares)])
    return [device.name for device in ls.config.list_logical_devices("CPU")]


def run_replicas(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """Trains with a MirroredStrategy of ``trial.contender.shares`` replicas on all cores."""
    torch.set_num_threads(trial.cores)
    train_replicas(trial.workload, trial.workload.make_batches(laps.total), laps, replicas=trial.contender.shares)


def train_replicas(workload: Workload, batches: Iterable[Batch], laps: StepTimer, *, replicas: int) -> None:
    """The hand-written loop with a MirroredStrategy.

    Args:
        workload: the work; its count is that of the batches.
        batches: global batches.
        laps: the stopwatch.
        replicas: among how many each batch is divided; they share the intra-op threads that the caller has set.
    """
    torch.manual_seed(0)
    train_with(ls.MirroredStrategy(split_cpu(replicas)), workload, batches, laps)


def train_with(strategy: ls.Strategy, workload: Workload, batches: Iterable[Batch], laps: StepTimer) -> None:
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


class _LapEveryBatch(Callback):
    """Tells the stopwatch that a batch is done."""

    def __init__(self, laps: StepTimer) -> None:
        super().__init__()
        self._laps = laps

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Counts a lap."""
        self._laps.lap(logs["loss"])


def fit_model(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """Trains with ``Model.fit`` on ``trial.contender.shares`` replicas."""
    torch.set_num_threads(trial.cores)
    torch.manual_seed(0)
    workload = trial.workload
    strategy = ls.MirroredStrategy(split_cpu(trial.contender.shares))
    with strategy.scope():
        module = workload.make_module()
        model = Model(module)
        model.compile(
            optimizer=torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True), loss=workload.loss
        )
    laps.trained = trained_parameters(module)
    model.fit(workload.make_batches(laps.total), callbacks=[_LapEveryBatch(laps)], verbose=0)
    strategy.close()


def train_one_share(trial: Trial, seat: ProcessInfo, laps: StepTimer) -> None:
    """One replica in this process, on its own share of each global batch; several processes are timed side by side."""
    shares = trial.contender.shares
    torch.set_num_threads(max(1, trial.cores // shares))
    workload = replace(trial.workload, count=trial.workload.count // shares)
    batches = [split_batch(batch, shares)[seat.rank] for batch in trial.workload.make_batches(laps.total)]
    train_replicas(workload, _meeting(batches, trial, seat), laps, replicas=1)


def _meeting(batches: Sequence[Batch], trial: Trial, seat: ProcessInfo) -> Iterator[Batch]:
    """The batches; before the last step of the warm-up the processes wait for each other."""
    for index, batch in enumerate(batches):
        if index == trial.warm_up - 1:
            _meet(trial.contender.processes, seat)
        yield batch


def _meet(processes: int, seat: ProcessInfo) -> None:
    store = FileStore(seat.store, processes)
    if store.add("arrived", 1) == processes:
        store.set("all", "1")
    store.wait(["all"], timedelta(seconds=TRIAL_LIMIT_S))


_LOOPBACK = "127.0.0.1"


def run_worker(trial: Trial, seat: ProcessInfo, laps: StepTimer, *, compression: Compression | None = None) -> None:
    """One of ``trial.contender.processes`` workers, each with an equal part of the replicas. All must call it.

    Args:
        trial: the work.
        seat: this worker's.
        laps: the stopwatch.
        compression: of what the workers send each other.
    """
    torch.set_num_threads(trial.threads_per_process)
    torch.manual_seed(0)
    devices = split_cpu(trial.contender.shares // trial.contender.processes)
    cluster = _cluster(trial.contender.processes, seat)
    options = ls.CommunicationOptions(compression=compression)
    strategy = ls.MultiWorkerMirroredStrategy(devices, cluster=cluster, communication=options)
    train_with(strategy, trial.workload, trial.workload.make_batches(laps.total), laps)


def _cluster(workers: int, seat: ProcessInfo) -> ls.ClusterSpec:
    """The chief tells the others, through the file at which they meet, where its store will listen."""
    store = FileStore(seat.store, workers)
    if seat.rank == 0:
        with socket.socket() as probe:
            probe.bind((_LOOPBACK if seat.host is None else seat.host.address, 0))
            host, port = probe.getsockname()
        store.set("chief", f"{host}:{port}")
    return ls.ClusterSpec(workers=(store.get("chief").decode(), *[""] * (workers - 1)), index=seat.rank)
