"""A loop of its own on replicas, for the suite ``steps``, up to one part of its step, which the environment names."""

from __future__ import annotations

from functools import partial
from itertools import repeat

import torch.nn.functional as F
from program import start_timer, take_job
from steps_replicas import strategy_of
from steps_work import chosen_part, make_work, run_parts, trained_by

import lockstep as ls
from benchmarks.small_steps import PARTS, fused_adam


def average_loss(output, target):
    """The part of this replica's rows in the mean over the global batch."""
    return ls.compute_average_loss(F.mse_loss(output, target, reduction="none").mean(dim=1))


def main() -> None:
    """Runs the parts of each step on logical CPU devices. Only the last part divides batches, one for each step."""
    job, part = take_job(), chosen_part()
    module, batches = make_work(job)
    strategy = strategy_of(job)
    mirrored = strategy.mirror(module)
    optimizer = strategy.mirror(fused_adam(module))
    step = partial(run_parts, part, module=mirrored, loss_of=average_loss, optimizer=optimizer)
    timer = start_timer(job, trained=trained_by(module))
    divided = strategy.distribute_dataset(batches)
    for batch in divided if part == PARTS[-1] else repeat(next(iter(divided)), len(batches)):
        strategy.run(step, args=batch)
        timer.record_step(lambda: 0.0)
    strategy.close()


if __name__ == "__main__":
    main()
