"""Trains a recipe on one configuration and times its steps: what a fresh process of a scaling run does.

The step is that of ``Model.fit``. Reading a clock takes at most 0.2 us, so on a CPU the timed steps also give the
parts. A GPU computes asynchronously; there the parts come from further steps, in which every replica waits for its
stream after each part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lockstep.data.dataset import DistributedDataset
from lockstep.data.sharding import batch_rows
from lockstep.errors import DataError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.optim.update import StepResult, UpdateTimes
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.watcher import Totals
from lockstep.strategies.base import Strategy
from lockstep.train.batch import module_arguments, unpack_labelled
from lockstep.train.loss_totals import loss_sums, no_examples
from lockstep_tools.recipes.training import Task

PARTS = ("input", "forward", "backward", "exchange", "update", "waiting", "other")
"""The parts of a step, in the order in which they are shown."""
GPU_PROFILED_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class ReplicaMarks:
    """Moments of one replica's step, in seconds of ``time.perf_counter()``."""

    began_s: float  # the step function was entered
    forward_s: float  # the loss of the shard was computed
    backward_s: float  # its gradients were computed
    finished_s: float  # the update was done and the gradients cleared


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds of one step; all but the step and the input are means over the replicas."""

    step: float  # from the end of the previous step to the end of this one
    input: float  # until the next global batch was divided and on its devices
    forward: float  # the module and its loss
    backward: float  # the gradients
    exchange: float  # summing gradients over the replicas
    update: float  # dividing, updating, clearing the gradients
    # For other replicas: for a turn where they share cores, for the slowest at the update, for its end. What the
    # slowest itself spends on a meeting is not waiting.
    waiting: float
    other: float  # what is left: starting the replicas, their meetings, and collecting what they return


def step_times(
    *,
    requested_s: float,
    received_s: float,
    ended_s: float,
    replicas: Sequence[ReplicaMarks],
    updates: Sequence[UpdateTimes | None],
) -> StepTimes:
    """The times of a step, from the moments when its batch was requested and there, and when all replicas had returned.

    ``updates`` has None for an update that was skipped.
    """
    performed = [times for times in updates if times is not None]
    spent = {
        "input": received_s - requested_s,
        "forward": fmean(marks.forward_s - marks.began_s for marks in replicas),
        "backward": fmean(marks.backward_s - marks.forward_s for marks in replicas),
        "exchange": fmean(times.exchange_s if times else 0.0 for times in updates),
        # With clearing the gradients and, on a GPU that was waited for, the rest of its work.
        "update": fmean(
            times.update_s + marks.finished_s - times.closed_s if times else 0.0
            for marks, times in zip(replicas, updates, strict=True)
        ),
        "waiting": _beyond_shortest([marks.began_s for marks in replicas])
        + _beyond_shortest([times.opened_s - times.arrived_s for times in performed])
        + _beyond_shortest([times.closed_s - times.updated_s for times in performed]),
    }
    step_s = ended_s - requested_s
    spent["other"] = step_s - sum(spent.values())
    return StepTimes(step=1000 * step_s, **{part: 1000 * seconds for part, seconds in spent.items()})


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean of each part; they add up to the mean step."""
    return StepTimes(**{name: fmean(getattr(step, name) for step in steps) for name in ("step", *PARTS)})


def _beyond_shortest(seconds: Sequence[float]) -> float:
    """The mean of what each spends beyond the one that spends least, which waits for nobody."""
    return fmean(seconds) - min(seconds) if seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process measured."""

    step_ms: tuple[float, ...]  # each timed step
    parts: tuple[StepTimes, ...]  # of each timed step; on a GPU, of ``GPU_PROFILED_STEPS`` further steps
    timed_s: float  # from requesting the first timed batch to the end of the last timed step
    examples: int  # in the timed steps
    steps_an_epoch: int
    loss: float  # of the last timed step
    source: str  # of the data

    @property
    def examples_per_s(self) -> float:
        return self.examples / self.timed_s


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One step of all replicas."""

    times: StepTimes
    examples: int
    result: StepResult


def measure(strategy: Strategy, task: Task, *, batch_size: int, warm_up: int, timed_steps: int) -> Record:
    """Trains ``warm_up`` steps of one epoch, then times ``timed_steps`` from the start of the next.

    Raises a DataError if an epoch holds less than one global batch.
    """
    train = strategy.distribute_dataset(task.train)
    module = strategy.mirror(task.module, sync_batchnorm=task.sync_batchnorm).train()
    optimizer = strategy.mirror(task.optimizer(module.parameters()))
    step = partial(train_shard, task, module, optimizer)

    def laps(epoch: int, number: int, *, synchronize: bool = False) -> list[Lap]:
        """``synchronize``: whether every replica waits for its GPU after each part of the step."""
        # Closed at once: a generator that waits in ``yield`` would keep its prefetch thread and batches until it is
        # collected.
        with closing(_batches(train, epoch)) as batches:
            return list(islice(_laps(strategy, step, optimizer, batches, synchronize), number))

    warm = laps(0, warm_up)
    # One short batch an epoch would be timed again and again under the name of a full one.
    if len(task.train) == 1 and warm[0].examples < batch_size:
        raise DataError(
            f"an epoch has {warm[0].examples} examples, fewer than one global batch of {batch_size}; "
            "lower --batch-size or --replicas, or give more data"
        )
    _wait_for_gpus(strategy)
    started_s = time.perf_counter()
    timed = laps(1, timed_steps)
    _wait_for_gpus(strategy)
    timed_s = time.perf_counter() - started_s
    # Waiting after each part makes a step slower, so these steps are not among the timed ones.
    profiled = laps(2, GPU_PROFILED_STEPS, synchronize=True) if strategy.devices[0].kind == "GPU" else timed
    total, counted = float(timed[-1].result.total), float(timed[-1].result.count)
    return Record(
        step_ms=tuple(lap.times.step for lap in timed),
        parts=tuple(lap.times for lap in profiled),
        timed_s=timed_s,
        examples=sum(lap.examples for lap in timed),
        steps_an_epoch=len(task.train),
        loss=total / counted if counted else float("nan"),
        source=task.source,
    )


def _wait_for_gpus(strategy: Strategy) -> None:
    for device in strategy.devices:
        if device.kind == "GPU":
            torch.cuda.synchronize(device.torch_device)


def _batches(train: DistributedDataset, first: int) -> Generator[Any, None, None]:
    for epoch in count(first):
        train.set_epoch(epoch)
        yield from train


def _laps(
    strategy: Strategy,
    step: Callable[..., Any],
    optimizer: MirroredOptimizer,
    batches: Iterator[Any],
    synchronize: bool,
) -> Iterator[Lap]:
    """Trains one step for every lap that is taken."""
    requested_s = time.perf_counter()
    for batch in batches:
        received_s = time.perf_counter()
        marks, rows, results = zip(*strategy.local_results(strategy.run(step, (batch, synchronize))), strict=True)
        ended_s = time.perf_counter()
        times = step_times(
            requested_s=requested_s, received_s=received_s, ended_s=ended_s, replicas=marks, updates=optimizer.times
        )
        yield Lap(times=times, examples=sum(rows), result=results[0])
        requested_s = ended_s


def train_shard(
    task: Task, module: MirroredModule, optimizer: MirroredOptimizer, item: Any, synchronize: bool
) -> tuple[ReplicaMarks, int, StepResult]:
    """Forward, backward and update of one replica; also returns its number of rows. Every replica must call it."""
    context, rows = get_replica_context(), batch_rows(item)
    if context is None:
        raise UsageError("a step was called outside a replica; call it through strategy.run")
    total: Tensor | float = 0.0
    counted: Tensor | float = 0.0
    began_s = time.perf_counter()
    # A shard without rows has nothing to add, but its replica must be there when batch norm meets the others.
    if rows or module.has_sync_batchnorm:
        batch = unpack_labelled(item)
        args, kwargs = module_arguments(batch.x)
        outputs = module(*args, **kwargs)
        total, counted = loss_sums(task.loss(outputs, batch.y), rows) if rows else no_examples(outputs)
    forward_s = _now(synchronize)
    if isinstance(total, Tensor):
        torch.autograd.backward(total)
        total = total.detach()
    backward_s = _now(synchronize)
    result = optimizer.update(context, totals=Totals(total, counted))
    marks = ReplicaMarks(began_s=began_s, forward_s=forward_s, backward_s=backward_s, finished_s=_now(synchronize))
    return marks, rows, result


def _now(synchronize: bool) -> float:
    if synchronize:
        # Without it the clock would tell when the work was issued: a GPU computes asynchronously.
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
