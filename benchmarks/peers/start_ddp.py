"""The same work as a hand-written program, for the suite ``start``: DDP under torchrun, or one process without it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from program import start_timer, take_job
from start_work import launcher_of, part_of, work_of
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Trains in one of the processes."""
    job = take_job()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    if world > 1:
        dist.init_process_group("gloo")
    work = work_of(job)
    model = work.module
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=work.learning_rate, fused=True)
    timer = start_timer(job, trained=sum(each.numel() for each in model.parameters() if each.requires_grad))
    timer.launcher = launcher_of(rank) if world > 1 else None
    for _, (x, y) in zip(range(timer.total), work.batches, strict=False):
        optimizer.zero_grad()
        # DDP takes the mean of the processes' gradients
        loss = work.loss_of(model, part_of(x, rank, world), part_of(y, rank, world)) * world
        loss.backward()
        optimizer.step()
        work.log(loss.item())
        timer.record_step(loss.item())


if __name__ == "__main__":
    main()
