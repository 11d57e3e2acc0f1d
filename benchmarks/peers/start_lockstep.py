"""A plain program with MirroredStrategy, for the suite ``start``."""

from __future__ import annotations

import torch
from program import start_timer, take_job
from start_work import work_of

import lockstep as ls


def main() -> None:
    """Trains on logical CPU devices."""
    job = take_job()
    (cpu,) = ls.config.list_physical_devices("CPU")
    parts = [ls.config.LogicalDeviceConfiguration() for _ in range(job.replicas)]
    ls.config.set_logical_device_configuration(cpu, parts)
    strategy = ls.MirroredStrategy()
    torch.manual_seed(0)
    work = work_of(job)
    module = strategy.mirror(work.module)
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), lr=work.learning_rate, fused=True))

    def step(x, y):
        optimizer.zero_grad()
        loss = work.loss_of(module, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    timer = start_timer(job, trained=0)
    for x, y in strategy.distribute_dataset(work.batches):
        losses = strategy.run(step, args=(x, y))
        timer.record_step(float(strategy.reduce("sum", losses)))
    strategy.close()


if __name__ == "__main__":
    main()
