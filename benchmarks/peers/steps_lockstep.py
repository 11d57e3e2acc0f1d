"""A loop of its own on replicas, for the suite ``steps``."""

from __future__ import annotations

import torch.nn.functional as F
from program import start_timer, take_job
from steps_replicas import strategy_of
from steps_work import make_work, trained_by

import lockstep as ls
from benchmarks.small_steps import fused_adam


def main() -> None:
    """Trains on logical CPU devices."""
    job = take_job()
    module, batches = make_work(job)
    strategy = strategy_of(job)
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(fused_adam(module))

    def step(x, y):
        errors = F.mse_loss(mirrored(x), y, reduction="none")
        loss = ls.compute_average_loss(errors.mean(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    timer = start_timer(job, trained=trained_by(module))
    for batch in strategy.distribute_dataset(batches):
        losses = strategy.run(step, args=batch)
        timer.record_step(lambda losses=losses: float(strategy.reduce("sum", losses)))
    strategy.close()


if __name__ == "__main__":
    main()
