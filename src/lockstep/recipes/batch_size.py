"""The search behind ``--batch-size auto``: the largest global batch of a recipe's module, optimizer and loss.

It tries training steps as ``Model.fit`` takes them; the strategy does the search.
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
    """The result of the search.

    Args:
        size: examples in the largest global batch.
        examples: examples in the training split, which is the limit of the search.
        memory_mb: memory limit of this process in MB; None on GPUs, which have limits of their own.
    """

    size: int
    examples: int
    memory_mb: float | None


def largest_batch(
    model: Model, config: CompileConfig, make_batch: Callable[[int], Any], *, start: int, examples: int
) -> LargestBatch:
    """Tries training steps until it finds the largest batch that fits in memory; the model does not change.

    Args:
        model: a model that was compiled with an optimizer.
        config: loss, precision and clipping of the steps.
        make_batch: returns (x, y) with the given number of rows, each as large as the largest of the data.
        start: number of rows to begin with.
        examples: number of examples in the training split.

    Raises:
        DeviceMemoryError: not even one example per replica fits.
    """
    strategy = model.strategy
    module = strategy.mirror(model.module).train()
    precision = Precision(config.precision, strategy.devices[0].torch_device.type)
    setup = TrainSetup(module=module, config=config, precision=precision, optimizer=model.optimizer)

    def step(shard: Any) -> None:
        train_step(setup, ReplicaState({}), shard, True)

    budget_mb = default_budget_mb(strategy.devices)
    size = strategy.find_batch_size(
        step,
        make_batch,
        start,
        limit=examples,
        multiple_of=min(strategy.num_replicas_in_sync, examples),
        memory_mb=budget_mb,
    )
    return LargestBatch(size=size, examples=examples, memory_mb=budget_mb)
