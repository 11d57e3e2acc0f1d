"""The workloads for the programs on torch: the very modules, batches and losses of the benchmark's own contenders.

The harness puts the package on the path; it is not installed in the peers' environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from program import Job
from torch import Tensor, nn

from benchmarks.loops import laid_out, memory_format, trained_parameters
from benchmarks.trial import Batch
from benchmarks.workloads import WORKLOADS
from lockstep.data.sharding import split_batch


@dataclass(frozen=True, kw_only=True)
class TorchWork:
    """One process's part of a workload."""

    module: nn.Module  # in training mode, of random weights
    # ``loss_of(model, x, y)`` of a shard, so divided that the mean over the processes of its gradients, which DDP
    # takes, is the gradient of the global batch
    loss_of: Callable[[Any, Any, Tensor], Tensor]
    shards: list[Batch]  # this process's part of each global batch

    @property
    def trained(self) -> int:
        return trained_parameters(self.module)


def make_work(job: Job, rank: int) -> TorchWork:
    """A process's part of the job."""
    workload = WORKLOADS[job.workload]
    divisor = workload.count / job.replicas

    def loss_of(model: Any, x: Any, y: Tensor) -> Tensor:
        total, _ = workload.loss(model(**x) if isinstance(x, dict) else model(x), y)
        return total / divisor

    batches = workload.make_batches(job.warm_up + job.steps)
    return TorchWork(
        module=workload.make_module().train().to(memory_format=memory_format(job.layout)),
        loss_of=loss_of,
        shards=laid_out([split_batch(batch, job.replicas)[rank] for batch in batches], job.layout),
    )
