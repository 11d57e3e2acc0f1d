"""Hugging Face Accelerate under torchrun, one of the launchers that its documentation names.

Its own ``accelerate launch`` starts a second process on a CPU through MPI only.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from program import start_timer, take_job
from torch_work import make_work


def main() -> None:
    """Trains in one of the processes."""
    job = take_job()
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    kwargs = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    work = make_work(job, accelerator.process_index)
    optimizer = torch.optim.Adam(work.module.parameters(), lr=job.learning_rate, fused=True)
    model, optimizer = accelerator.prepare(work.module, optimizer)
    timer = start_timer(job, trained=work.trained)
    for x, y in work.shards:
        optimizer.zero_grad()
        loss = work.loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        timer.record_step(loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
