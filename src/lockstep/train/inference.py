"""Evaluation and prediction: passes over data that train nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep._torch_compat import tree_flatten, tree_unflatten
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.device.async_scalars import NO_SCALARS, AsyncScalars
from lockstep.strategies.base import Strategy
from lockstep.train.batch import keeping_modes
from lockstep.train.callbacks.base import CallbackList, Logs
from lockstep.train.compile import Precision, TrainSetup
from lockstep.train.epoch_iterator import EpochIterator
from lockstep.train.logs import RunningLoss, StepClock, batch_logs
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.step import ReplicaState, evaluate_step, predict_step, train_step


@contextmanager
def module_mode(mirrored: MirroredModule, *, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode for the block, and restores the flags of each of the user's submodules."""
    with keeping_modes(mirrored.module):
        mirrored.train(training)
        if not training:
            # All replicas evaluate with the averaged statistics, as one device has one set of them
            # (test_batch_norm_statistics_are_averaged_before_evaluation_and_in_the_file).
            mirrored.sync_buffers()
        yield


def run_evaluation(
    setup: TrainSetup, data: EpochIterator, *, callbacks: CallbackList, clock: StepClock
) -> dict[str, float]:
    """The loss and metrics over the data, each row counted once. Every worker must call it."""
    strategy = setup.strategy
    metrics = ReplicaMetrics(strategy, setup.config.metrics)
    states = PerReplica([ReplicaState(values) for values in metrics.per_replica])
    loss = RunningLoss()
    strategy.check_choice.check_rows_in(evaluate_step)

    def run(batch: Any) -> tuple[int, Logs]:
        outputs = strategy.local_results(strategy.run(evaluate_step, (setup, states, batch)))
        metrics.skip_input_checks()
        sums = [number for output in outputs for number in (output.total, output.count)]
        loss.add(AsyncScalars([*sums, 0.0], strategy.devices[0]), epoch=0, step=clock.steps + 1)
        now = loss.now()
        logs = {} if now.arrived and not now.count else batch_logs(now, (), NO_SCALARS)
        return sum(output.rows for output in outputs), logs

    with module_mode(setup.module, training=False):
        callbacks.call("on_test_begin")
        _run_batches("test", data, run, callbacks=callbacks, clock=clock)
        replicas = loss.rows(len(strategy.devices))
        examples = [clock.examples] + [0] * (len(replicas) - 1)
        numbers = [(*sums, number) for sums, number in zip(replicas, examples, strict=True)]
        total, count, rows = strategy.workers.sum_numbers("end of an evaluation", numbers)
        clock.examples = int(rows)
        logs = {"loss": RunningLoss(total, count).final(), **metrics.compute()}
        callbacks.call("on_test_end", logs=logs)
    return logs


def run_prediction(
    strategy: Strategy,
    module: MirroredModule,
    precision: Precision,
    data: EpochIterator,
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> Any:
    """The module's outputs for all rows, in the order of the data, on the CPU. Every worker must call it."""
    collected = CollectedOutputs()
    if not any(strategy.check_choice.has_checked_rows_in(step) for step in (train_step, evaluate_step)):
        strategy.check_choice.check_rows_in(predict_step)

    def run(batch: Any) -> tuple[int, Logs]:
        shards = strategy.local_results(strategy.run(predict_step, (module, precision, batch)))
        collected.begin_batch()
        for shard in shards:
            if shard.rows:
                collected.add(shard.rows, shard.outputs)
        return sum(shard.rows for shard in shards), {}

    with module_mode(module, training=False):
        callbacks.call("on_predict_begin")
        _run_batches("predict", data, run, callbacks=callbacks, clock=clock)
        callbacks.call("on_predict_end")
        return collected.joined(strategy.workers)


def _run_batches(
    kind: Literal["test", "predict"],
    data: EpochIterator,
    run: Callable[[Any], tuple[int, Logs]],
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> None:
    """Calls ``run``, which returns rows and logs, for every batch without gradients, and the callbacks around it."""
    clock.start()
    with torch.no_grad(), closing(data.epoch(0)) as batches:
        for step, batch in enumerate(batches):
            clock.pause()
            callbacks.call(f"on_{kind}_batch_begin", step)
            clock.start()
            rows, logs = run(batch)
            clock.stop(rows=rows)
            callbacks.call(f"on_{kind}_batch_end", step, logs=logs)
            clock.start()


class CollectedOutputs:
    """The outputs of predict, shard by shard in the order of the data, joined once at the end."""

    def __init__(self) -> None:
        self._spec: Any = None
        self._shards: list[list[Tensor]] = []
        self._rows: list[int] = []  # of each global batch

    def begin_batch(self) -> None:
        """Begins another global batch."""
        self._rows.append(0)

    def add(self, rows: int, outputs: Any) -> None:
        """Adds the outputs of one shard: tensors of ``rows`` rows, in the same structure each time."""
        leaves, spec = tree_flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
                kind = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise ConfigError(
                    f"the module returned {kind} for {rows} rows; predict joins rows of tensors: return tensors whose "
                    f"first dimension is {rows}; of a module that computes a loss from labels, leave these out of x"
                )
        if self._spec not in (None, spec):
            raise ConfigError(
                f"the module returned {spec} after {self._spec}; predict needs one structure for all batches"
            )
        self._spec = spec
        self._rows[-1] += rows
        self._shards.append([leaf.detach().cpu() for leaf in leaves])

    def joined(self, workers: Communicator) -> Any:
        """The rows of all workers, with one tensor per leaf of the outputs, on the CPU. Every worker must call it."""
        columns = [torch.cat(column) for column in zip(*self._shards, strict=True)]
        # A worker without rows takes the structure of another one's.
        empty = None if self._spec is None else _plain(tree_unflatten([column[:0] for column in columns], self._spec))
        structures = [
            structure
            for structure in all_gather_object(workers, "structure of the predictions", empty)
            if structure is not None
        ]
        if not structures:
            raise ConfigError("predict got no rows on any worker; give data with at least one row")
        if workers.is_single:
            return tree_unflatten(columns, self._spec)
        if self._spec is None:
            columns, self._spec = tree_flatten(structures[0])
        rows = all_gather_object(workers, "rows of the predictions", self._rows)
        gathered = [workers.all_gather("predictions", column, 0) for column in columns]
        return tree_unflatten([_interleaved(parts, rows) for parts in gathered], self._spec)


def _plain(structure: Any) -> Any:
    """The same tensors in dicts, lists and tuples: a worker without rows does not know the user's classes."""
    if isinstance(structure, Mapping):
        return {key: _plain(value) for key, value in structure.items()}
    if isinstance(structure, (tuple, list)):
        return (list if isinstance(structure, list) else tuple)(map(_plain, structure))
    return structure


def _interleaved(parts: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """The workers' rows in the order of the data: batch by batch, and in each batch worker by worker."""
    batches = zip(*(torch.split(part, list(counts)) for part, counts in zip(parts, rows, strict=True)), strict=True)
    return torch.cat([shard for batch in batches for shard in batch])
