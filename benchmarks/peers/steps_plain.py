"""The plain loop of the suite ``steps``, the unit of its figures: one process with torch, and nothing of ours."""

from __future__ import annotations

import torch.nn.functional as F
from program import start_timer, take_job
from steps_work import make_work, trained_by

from benchmarks.small_steps import fused_adam


def main() -> None:
    """Trains by hand."""
    job = take_job()
    module, batches = make_work(job)
    optimizer = fused_adam(module)
    timer = start_timer(job, trained=trained_by(module))
    for x, y in batches:
        loss = F.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        timer.record_step(loss.item)


if __name__ == "__main__":
    main()
