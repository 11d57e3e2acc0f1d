"""The loop written by hand on torch alone, eager or through torch.compile, and DDP around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.ddp import NO_BROADCAST
from benchmarks.contenders.plain import laid_out, memory_format, trained_parameters
from benchmarks.gpu.ahead import on_device, pinned
from benchmarks.gpu.device_laps import DeviceLaps
from benchmarks.gpu.setting import Setting, begin_process
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Batch, Layout, Trial
from lockstep.data.sharding import split_batch

COMPILE_MODE = "reduce-overhead"

LossOf = Callable[[Any, Tensor], Tensor]


def train_plain(trial: Trial, seat: Seat, laps: Laps, *, setting: Setting, compiled: bool) -> None:
    """One process, the whole batch.

    Args:
        trial: the work.
        seat: of the only process.
        laps: the stopwatch.
        setting: device, precision and pace.
        compiled: whether forward pass and loss go through torch.compile, whose mode captures CUDA graphs.
    """
    device = begin_process(setting)
    module = made(trial, device)
    loss_of = loss_function(trial, setting, module, divisor=trial.workload.count)
    if compiled:
        loss_of = _compiled(loss_of)
    train(trial, laps, setting, loss_of, trial.workload.make_batches(setting.pace.steps), module)


def train_ddp(trial: Trial, seat: Seat, laps: Laps, *, setting: Setting) -> None:
    """One of ``trial.contender.processes`` processes on one device. All of them must call it; gloo, by a file.

    DDP averages the processes' gradients, so each divides its sum by its part of the count.
    """
    device = begin_process(setting)
    torch.set_num_threads(trial.threads_per_process)
    world = trial.contender.processes
    dist.init_process_group("gloo", init_method=f"file://{seat.store}", rank=seat.rank, world_size=world)
    module = made(trial, device)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True, **NO_BROADCAST)
    loss_of = loss_function(trial, setting, wrapped, divisor=trial.workload.count / world)
    shards = _own_shards(trial.workload.make_batches(setting.pace.steps), seat.rank, world)
    train(trial, laps, setting, loss_of, shards, wrapped)
    dist.destroy_process_group()


def made(trial: Trial, device: torch.device) -> nn.Module:
    """The model in training mode on the device, in the contender's memory format."""
    module: nn.Module = trial.workload.make_module().train()
    return module.to(device=device, memory_format=memory_format(trial.contender.layout))  # type: ignore[call-overload,no-any-return]


def loss_function(trial: Trial, setting: Setting, module: nn.Module, *, divisor: float) -> LossOf:
    """``loss_of(x, y)``: forward pass and loss, the sum over what is counted divided by ``divisor``."""

    def loss_of(x: Any, y: Tensor) -> Tensor:
        with setting.autocast():
            total, _ = trial.workload.loss(module(**x) if isinstance(x, dict) else module(x), y)
            return total / divisor

    return loss_of


def train(
    trial: Trial, laps: Laps, setting: Setting, loss_of: LossOf, batches: Sequence[Batch], module: nn.Module
) -> None:
    """The usual loop: clear, forward, backward, update; the losses are added up where they are.

    Args:
        trial: the work.
        laps: the stopwatch.
        setting: device and pace.
        loss_of: forward pass and loss.
        batches: this process's part of each global batch.
        module: whose parameters are trained.
    """
    device = setting.torch_device
    optimizer = torch.optim.Adam(module.parameters(), lr=trial.workload.learning_rate, fused=True)
    laps.trained = trained_parameters(module)
    clock = DeviceLaps(laps, setting.pace, device)
    losses = torch.zeros((), device=device)
    for x, y in on_device(_ready(batches, trial.contender.layout, device), device):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.add_(loss.detach())
        clock.step(lambda: losses.item() / setting.pace.steps)


def _ready(batches: Sequence[Batch], layout: Layout, device: torch.device) -> list[Batch]:
    """Pictures in the memory format, in pinned memory; each different batch once."""
    different = {id(batch): laid_out([batch], layout)[0] for batch in batches}
    return pinned([different[id(batch)] for batch in batches], device)


def _compiled(loss_of: LossOf) -> LossOf:
    inner: LossOf = torch.compile(loss_of, mode=COMPILE_MODE)

    def begin_and_call(x: Any, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return inner(x, y)

    return begin_and_call


def _own_shards(batches: Sequence[Batch], rank: int, world: int) -> list[Batch]:
    """A process's part of each batch; of a batch that comes again it is one."""
    different = {id(batch): split_batch(batch, world)[rank] for batch in batches}
    return [different[id(batch)] for batch in batches]
