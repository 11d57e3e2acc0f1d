"""What the programs of the suite ``steps`` train, on torch alone."""

from __future__ import annotations

import torch
from program import Job
from torch import Tensor, nn

from benchmarks.small_steps import MODULES, small_batches


def make_work(job: Job) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    """The model and the global batch of each step. From here on torch has the threads of the job."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    return MODULES[job.workload](), small_batches(job.workload, job.warm_up + job.steps)


def trained_by(module: nn.Module) -> int:
    """How many numbers the optimizer changes."""
    return sum(parameter.numel() for parameter in module.parameters())
