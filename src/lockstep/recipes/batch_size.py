"""The largest global batch of a recipe's own module, optimizer and loss: what ``--batch-size auto`` finds.

The steps are those of ``Model.fit``; searching is the strategy's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.strategies.batch_size import default_budget_mb
from lockstep.train.compile import CompileConfig, Precision, TrainSetup
from lockstep.train.model import Model
from lockstep.train.step import ReplicaState, train_step


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """What was found.

    Args:
        size: examples in a global batch.
        examples: in the training part; no batch is larger.
        memory_mb: MB that the process may have resident while it trains; None on GPUs, which have their own limits.
    """

    size: int
    examples: int
    memory_mb: float | None


def largest_batch(
    model: Model, config: CompileConfig, make_item: Callable[[int], Any], *, start: int, examples: int
) -> LargestBatch:
    """Tries training steps until the largest batch that fits is found; the model stays as it is.

    Args:
        model: compiled with an optimizer.
        config: what its steps compute.
        make_item: gives (x, y) of so many rows, each as large as any in the data.
        start: rows to begin with.
        examples: in the training part.

    Raises:
        DeviceMemoryError: not even one example a replica fits.
    """
    strategy = model.strategy
    module = strategy.mirror(model.module).train()
    precision = Precision(config.precision, strategy.devices[0].torch_device.type)
    job = TrainSetup(module=module, config=config, precision=precision, optimizer=model.optimizer)

    def step(shard: Any) -> None:
        train_step(job, ReplicaState({}), shard, True)

    budget_mb = default_budget_mb(strategy.devices)
    size = strategy.find_batch_size(
        step,
        make_item,
        start,
        limit=examples,
        multiple_of=min(strategy.num_replicas_in_sync, examples),
        memory_mb=budget_mb,
    )
    return LargestBatch(size=size, examples=examples, memory_mb=budget_mb)
