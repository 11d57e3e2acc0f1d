"""What the programs of the suite ``steps`` train, on torch alone."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from program import Job
from torch import Tensor, nn

from benchmarks.small_steps import MODULES, PARTS, STEP_PART, small_batches


def make_work(job: Job) -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    """The model and the global batch of each step. From here on torch has the threads of the job."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    return MODULES[job.workload](), small_batches(job.workload, job.warm_up + job.steps)


def trained_by(module: nn.Module) -> int:
    """How many numbers the optimizer changes."""
    return sum(parameter.numel() for parameter in module.parameters())


def chosen_part() -> str:
    """The last part of a step that is to run."""
    return os.environ[STEP_PART]


def run_parts(
    last: str,
    x: Tensor,
    y: Tensor,
    *,
    module: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """A step up to one of its parts."""
    number = PARTS.index(last)
    if number >= PARTS.index("forward"):
        output = module(x)
    if number >= PARTS.index("backward"):
        loss_of(output, y).backward()
    if number >= PARTS.index("update"):
        optimizer.step()
    if number >= PARTS.index("backward"):
        optimizer.zero_grad()  # where nothing is updated too: gradients that stay would be added up
