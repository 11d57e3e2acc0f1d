"""Hugging Face Accelerate in one process, for the suite ``steps``."""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from program import start_timer, take_job
from steps_work import make_work, trained_by

from benchmarks.small_steps import fused_adam


def main() -> None:
    """Trains in this process."""
    job = take_job()
    accelerator = Accelerator(cpu=True)
    module, batches = make_work(job)
    model, optimizer = accelerator.prepare(module, fused_adam(module))
    timer = start_timer(job, trained=trained_by(module))
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        timer.record_step(loss.item)


if __name__ == "__main__":
    main()
