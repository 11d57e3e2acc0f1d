"""DistributedDataParallel over gloo: one process a share, at the settings that torch's documentation recommends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.plain import laid_out, memory_format, train
from benchmarks.laps import Laps
from benchmarks.spawned import Seat
from benchmarks.trial import Trial
from lockstep.data.sharding import split_batch

_SWITCH = "forward_sync_buffers" if torch.__version__ >= (2, 13) else "broadcast_buffers"  # type: ignore[operator]
NO_BROADCAST: dict[str, Any] = {_SWITCH: False}
"""Buffers stay each process's own. torch 2.13 has given the switch another name."""
SETTINGS = "gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"


def train_ddp(trial: Trial, seat: Seat, laps: Laps, *, halved: bool = False) -> None:
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
