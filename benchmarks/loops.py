"""The training loops of the CPU suites: written by hand on torch, with DDP, and ours on replicas and on workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from lockstep.mirroring.module.compile import Compilation
from lockstep.replicas.cpu.memory import keep_freed_memory

_LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
SETTINGS = "gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a loop computes; the default is torch's own: uncompiled, in float32."""

    compiled: Mapping[str, Any] | None = None  # module and loss, with these settings; None leaves them as they are
    bf16: bool = False  # forward and loss run under autocast to bfloat16

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)

    def compile(self, function: Any) -> Any:
        """A function or module, compiled if the variant says so."""
        return function if self.compiled is None else torch.compile(function, **self.compiled)


PLAIN = Variant()


def layouts_of(workload: str) -> tuple[Layout, ...]:
    """The memory formats that baselines try, the faster one first: both where there are convolutions."""
    return ("channels_last", "contiguous") if workload.startswith("mobilenetv2") else ("contiguous",)


def suffix_of(layout: Layout) -> str:
    """What a contender's name says of a memory format."""
    return " channels_last" if layout == "channels_last" else ""


def memory_format(layout: Layout) -> torch.memory_format:
    """The name that torch has for a layout; raises ConfigError for "auto" and "framework", which are not torch's."""
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout={layout!r} is for our strategies; a plain loop takes one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout]


def laid_out(batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """The batches, with their images in the layout; a batch that comes again stays one object."""
    form = memory_format(layout)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=form) if tensor.ndim == 4 else tensor

    different = {id(batch): tree_map_only(Tensor, convert, batch) for batch in batches}
    return [different[id(batch)] for batch in batches]


def make_module(trial: Trial, device: torch.device | None = None) -> nn.Module:
    """The model in training mode, in the contender's memory format."""
    module: nn.Module = trial.workload.make_module().train()
    form = memory_format(trial.contender.layout)
    return module.to(device=device, memory_format=form)  # type: ignore[call-overload,no-any-return]


def trained_parameters(module: nn.Module) -> int:
    """How many numbers an optimizer changes: frozen parameters do not count, tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def adam(workload: Workload, module: nn.Module) -> torch.optim.Adam:
    """The optimizer of every contender on torch."""
    return torch.optim.Adam(module.parameters(), lr=workload.learning_rate, fused=True)


def call(module: Any, x: Any) -> Any:
    """The module's outputs; a dict holds its keyword arguments."""
    return module(**x) if isinstance(x, dict) else module(x)


def train(
    trial: Trial,
    module: nn.Module,
    summed: Callable[[Any, Tensor], Tensor],
    batches: Sequence[Batch],
    timer: StepTimer,
    *,
    divisor: float,
    variant: Variant,
) -> None:
    """The usual loop over this process's part of each global batch; ``summed`` is its loss before the division."""
    optimizer = adam(trial.workload, module)
    timer.trained = trained_parameters(module)
    for x, y in batches:
        optimizer.zero_grad()
        with variant.autocast():
            loss = summed(x, y) / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        timer.record_step(loss.item())


def train_alone(trial: Trial, process: ProcessInfo, timer: StepTimer, *, variant: Variant = PLAIN) -> None:
    """One process, the whole batch, all cores as intra-op threads."""
    torch.set_num_threads(trial.cores)
    torch.manual_seed(0)
    module = make_module(trial)

    def summed(x: Any, y: Tensor) -> Tensor:
        return trial.workload.loss(call(module, x), y)[0]

    batches = laid_out(trial.workload.make_batches(timer.total), trial.contender.layout)
    train(trial, module, variant.compile(summed), batches, timer, divisor=trial.workload.count, variant=variant)


def train_ddp(
    trial: Trial,
    process: ProcessInfo,
    timer: StepTimer,
    *,
    keeping: bool = False,
    halved: bool = False,
    variant: Variant = PLAIN,
) -> None:
    """One of ``trial.contender.processes`` processes. All of them must call it: they meet at ``process.store``.

    DDP averages the processes' gradients, so each divides its sum by its part of the count. ``keeping``: freed memory
    is kept, as by our strategies. ``halved``: gradients are sent in half precision, by torch's hook for fp16, since DDP
    refuses the one for bf16 over gloo.
    """
    if keeping:
        keep_freed_memory()
    torch.set_num_threads(trial.threads_per_process)
    torch.manual_seed(0)
    world = trial.contender.processes
    dist.init_process_group("gloo", init_method=f"file://{process.store}", rank=process.rank, world_size=world)
    wrapped = DistributedDataParallel(variant.compile(make_module(trial)), **DDP_OPTIONS)
    if halved:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    shards = [split_batch(batch, world)[process.rank] for batch in trial.workload.make_batches(timer.total)]
    batches, loss_of = laid_out(shards, trial.contender.layout), variant.compile(trial.workload.loss)

    def summed(x: Any, y: Tensor) -> Tensor:
        total: Tensor = loss_of(call(wrapped, x), y)[0]
        return total

    train(trial, wrapped, summed, batches, timer, divisor=trial.workload.count / world, variant=variant)
    dist.destroy_process_group()


def split_cpu(replicas: int) -> list[str]:
    """Splits the CPU into logical devices and gives their names."""
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration() for _ in range(replicas)])
    return [device.name for device in ls.config.list_logical_devices("CPU")]


def run_replicas(trial: Trial, process: ProcessInfo, timer: StepTimer, *, variant: Variant = PLAIN) -> None:
    """Trains with a MirroredStrategy of ``trial.contender.replicas`` replicas on all cores."""
    torch.set_num_threads(trial.cores)
    batches, replicas = trial.workload.make_batches(timer.total), trial.contender.replicas
    train_replicas(trial.workload, batches, timer, replicas=replicas, variant=variant)


def train_replicas(
    workload: Workload, batches: Iterable[Batch], timer: StepTimer, *, replicas: int, variant: Variant = PLAIN
) -> None:
    """``train_with`` a MirroredStrategy, whose replicas share the intra-op threads that the caller has set."""
    torch.manual_seed(0)
    train_with(ls.MirroredStrategy(split_cpu(replicas)), workload, batches, timer, variant=variant)


def train_with(
    strategy: ls.Strategy, workload: Workload, batches: Iterable[Batch], timer: StepTimer, *, variant: Variant = PLAIN
) -> None:
    """The hand-written loop over global batches; the strategy is closed at its end.

    Exchange and update are measured by the replicas' clocks: from the arrival of the last replica at
    ``optimizer.step`` to the moment when all have left it. What the others wait for the last one is no exchange.
    """
    module = strategy.mirror(workload.make_module())
    module.compile_as(None if variant.compiled is None else Compilation(**variant.compiled))
    timer.trained = trained_parameters(module)
    optimizer = strategy.mirror(adam(workload, module))
    loss_of = workload.loss if variant.compiled is None else torch.compile(workload.loss)

    def step(x: Any, y: Tensor) -> tuple[Tensor, float, float]:
        optimizer.zero_grad()
        with variant.autocast():
            total, _ = loss_of(call(module, x), y)
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
        timer.record_step(own * strategy.workers.size, exchange_s)
    strategy.close()


def train_one_shard(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One replica in this process, on its own shard of each global batch; several processes are timed side by side."""
    replicas = trial.contender.replicas
    torch.set_num_threads(max(1, trial.cores // replicas))
    workload = replace(trial.workload, count=trial.workload.count // replicas)
    batches = [split_batch(batch, replicas)[process.rank] for batch in trial.workload.make_batches(timer.total)]
    train_replicas(workload, _meeting(batches, trial, process), timer, replicas=1)


def _meeting(batches: Sequence[Batch], trial: Trial, process: ProcessInfo) -> Iterator[Batch]:
    """The batches; before the last step of the warm-up the processes wait for each other."""
    for index, batch in enumerate(batches):
        if index == trial.warm_up - 1:
            processes = trial.contender.processes
            store = FileStore(process.store, processes)
            if store.add("arrived", 1) == processes:
                store.set("all", "1")
            store.wait(["all"], timedelta(seconds=TRIAL_LIMIT_S))
        yield batch


def run_worker(trial: Trial, process: ProcessInfo, timer: StepTimer, *, compression: Compression | None = None) -> None:
    """One of ``trial.contender.processes`` workers, each with an equal part of the replicas. All must call it."""
    torch.set_num_threads(trial.threads_per_process)
    torch.manual_seed(0)
    devices = split_cpu(trial.contender.replicas // trial.contender.processes)
    cluster = cluster_of(trial, process)
    options = ls.CommunicationOptions(compression=compression)
    strategy = ls.MultiWorkerMirroredStrategy(devices, cluster=cluster, communication=options)
    train_with(strategy, trial.workload, trial.workload.make_batches(timer.total), timer)


def chief_address(trial: Trial, process: ProcessInfo) -> str:
    """HOST:PORT where rank 0 can listen, which it chooses. All of the trial's processes must call it."""
    store = FileStore(process.store, trial.contender.processes)
    if process.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1" if process.host is None else process.host.address, 0))
            host, port = probe.getsockname()
        store.set("chief", f"{host}:{port}")
    return store.get("chief").decode()


def cluster_of(trial: Trial, process: ProcessInfo) -> ls.ClusterSpec:
    """The trial's processes as workers. All of them must call it."""
    others = [""] * (trial.contender.processes - 1)
    return ls.ClusterSpec(workers=(chief_address(trial, process), *others), index=process.rank)
