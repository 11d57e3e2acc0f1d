"""The loops of the suite ``steps`` that several processes run: DDP, and a model that is divided between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from benchmarks.loops import DDP_OPTIONS, cluster_of, trained_parameters
from benchmarks.processes import ProcessInfo
from benchmarks.small_steps import fused_adam
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Batch, Trial
from lockstep.data.sharding import split_batch

MICROBATCHES = 4
"""Of a pipeline of two workers; what our strategy chooses."""


def train_ddp(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One of the processes, which divide each batch. All of them must call it."""
    _join(trial, process)
    world = trial.contender.processes
    module, batches = _work(trial, timer)
    wrapped = DistributedDataParallel(module, **DDP_OPTIONS)
    _train(wrapped, [split_batch(batch, world)[process.rank] for batch in batches], timer)
    dist.destroy_process_group()


def train_torch_tensor(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One of the tensor ranks, by torch's own ``parallelize_module``. All of them must call it."""
    _join(trial, process)
    module, batches = _work(trial, timer)
    parallelize_module(module, init_device_mesh("cpu", (trial.contender.processes,)), dict(_plan()))
    _train(module, batches, timer)
    dist.destroy_process_group()


def _train(module: nn.Module, batches: list[Batch], timer: StepTimer) -> None:
    """The usual loop over this process's rows."""
    optimizer = fused_adam(module)
    for x, y in batches:
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        timer.record_step(loss.item)


def train_torch_pipeline(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One of the two stages, by torch's own schedule. Both processes must call it."""
    _join(trial, process)
    module, batches = _work(trial, timer)
    half, last = len(module) // 2, process.rank == 1
    part = module[half:] if last else module[:half]
    stage = PipelineStage(part, process.rank, trial.contender.processes, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = fused_adam(part)
    for x, y in batches:
        losses: list[Tensor] = []
        if last:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()
        timer.record_step(lambda losses=losses: _loss_of_last(losses))  # type: ignore[misc]
    dist.destroy_process_group()


def _loss_of_last(losses: list[Tensor]) -> float:
    """The loss that the last stage knows. Both processes must call it."""
    loss = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.broadcast(loss, src=1)
    return loss.item()


def train_our_tensor(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One of the tensor ranks, in a loop of its own on our strategy. All of them must call it."""
    torch.set_num_threads(trial.threads_per_process)
    strategy = ls.ParallelStrategy(tensor=trial.contender.processes, cluster=cluster_of(trial, process), seed=0)
    module, batches = _work(trial, timer)
    divided = strategy.parallelize(module, tensor_plan=_plan())
    optimizer = strategy.mirror(fused_adam(divided))

    def step(x: Tensor, y: Tensor) -> Tensor:
        errors = F.mse_loss(divided(x), y, reduction="none")
        loss = ls.compute_average_loss(errors.mean(dim=1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in strategy.distribute_dataset(batches):
        (loss,) = strategy.local_results(strategy.run(step, args=batch))
        timer.record_step(loss.item)
    strategy.close()


def train_our_pipeline(trial: Trial, process: ProcessInfo, timer: StepTimer) -> None:
    """One of the two stages, by ``Model.fit`` on our strategy. Both processes must call it."""
    torch.set_num_threads(trial.threads_per_process)
    strategy = ls.ParallelStrategy(pipeline=trial.contender.processes, cluster=cluster_of(trial, process), seed=0)
    module, batches = _work(trial, timer)
    with strategy.scope():
        model = ls.Model(module)
        model.compile(lambda weights: torch.optim.Adam(weights, trial.workload.learning_rate, fused=True), "mse")

    def record(_: int, logs: Mapping[str, float]) -> None:
        timer.record_step(lambda: logs["loss"])

    model.fit(batches, verbose=0, callbacks=[ls.LambdaCallback(on_train_batch_end=record)])
    strategy.close()


def _join(trial: Trial, process: ProcessInfo) -> None:
    """Has this process meet the others, with its intra-op threads."""
    torch.set_num_threads(trial.threads_per_process)
    world = trial.contender.processes
    dist.init_process_group("gloo", init_method=f"file://{process.store}", rank=process.rank, world_size=world)


def _work(trial: Trial, timer: StepTimer) -> tuple[Any, list[Batch]]:
    """The whole model, an ``nn.Sequential``, and the global batches."""
    torch.manual_seed(0)
    module = trial.workload.make_module()
    timer.trained = trained_parameters(module)
    return module, trial.workload.make_batches(timer.total)


def _plan() -> Mapping[str, ParallelStyle]:
    """Divides the first layer of each block by its outputs and the second by its inputs."""
    return {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
