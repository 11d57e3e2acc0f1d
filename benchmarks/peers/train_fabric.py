"""Lightning Fabric with its DDP strategy; ``launch`` starts this script again for each further process."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from program import start_timer, take_job
from torch_work import make_work


def main() -> None:
    """Trains in one of the processes."""
    job = take_job()
    strategy = DDPStrategy(
        process_group_backend="gloo", broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )
    fabric = Fabric(accelerator="cpu", devices=job.replicas, strategy=strategy)
    fabric.launch()
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    work = make_work(job, fabric.global_rank)
    optimizer = torch.optim.Adam(work.module.parameters(), lr=job.learning_rate, fused=True)
    model, optimizer = fabric.setup(work.module, optimizer)
    timer = start_timer(job, trained=work.trained)
    for x, y in work.shards:
        optimizer.zero_grad()
        loss = work.loss_of(model, x, y)
        fabric.backward(loss)
        optimizer.step()
        timer.record_step(loss.item())


if __name__ == "__main__":
    main()
