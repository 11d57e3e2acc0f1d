"""The plain loop of the suite ``steps`` up to one part of its step, which the environment names."""

from __future__ import annotations

import torch.nn.functional as F
from program import start_timer, take_job
from steps_work import chosen_part, make_work, run_parts, trained_by

from benchmarks.small_steps import fused_adam


def main() -> None:
    """Runs the parts of each step by hand."""
    job, part = take_job(), chosen_part()
    module, batches = make_work(job)
    optimizer = fused_adam(module)
    timer = start_timer(job, trained=trained_by(module))
    for x, y in batches:
        run_parts(part, x, y, module=module, loss_of=F.mse_loss, optimizer=optimizer)
        timer.record_step(lambda: 0.0)


if __name__ == "__main__":
    main()
