"""The functions that run inside each replica: one training step, one evaluation step, one prediction step.

    shard -> forward -> (total, count) -> backward of the SUM -> [update: sums over replicas, divided once]

They run in replica threads on the replica's own shard; the loops in ``loop.py`` run outside.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.data.sharding import batch_rows
from lockstep.data.structure import is_plain, leaf_has_rows, map_leaves, named_leaves, take_rows
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.step import StepResult, Totals
from lockstep.mirroring.partition import Pipelined
from lockstep.parallel.vocab_parallel import has_sharded_logits, keep_logits_sharded
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.train.batch import LabelledBatch, ShardRows, call_module, unpack_inputs, unpack_labelled
from lockstep.train.compile import Precision, TrainSetup
from lockstep.train.loss import ReplicaLoss, no_examples
from lockstep.train.metrics import LEAST_ROWS, check_metrics_additive, gather_states

Count = Tensor | float


class ReplicaState:
    """What one replica carries from step to step: its metrics, its loss, and its sums since the last update."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics
        self.metrics_checked = not metrics
        self.loss = ReplicaLoss()
        self.forget()

    def forget(self) -> None:
        """Starts the sums anew."""
        self.total: Count = 0.0
        self.count: Count = 0.0

    def add(self, total: Count, count: Count) -> None:
        """Adds one step's sums, in double precision."""
        self.total = self.total + _double(total)
        self.count = self.count + _double(count)


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One replica's part of a step: rows, the sums of its losses, and the update if there was one."""

    rows: int
    total: Count
    count: Count
    update: StepResult | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One replica's part of a prediction step: rows, and the module's outputs for them; None for no rows."""

    rows: int
    outputs: Any = None


def train_step(setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    """Forward and backward on this replica's shard; then the update, if it is due. Every replica must call it."""
    context, rows = _context(), batch_rows(item)
    with nullcontext() if update else setup.module.no_sync():
        if setup.module.pipeline is not None:
            total, count = _train_in_stages(setup, setup.module.pipeline, state, item, rows)
        else:
            total, count = _train(setup, state, item, context, rows)
    state.add(total, count)
    return StepOutput(
        rows=rows, total=total, count=count, update=update_weights(setup, state, context) if update else None
    )


def _train(
    setup: TrainSetup, state: ReplicaState, item: Any, context: ReplicaContext, rows: int
) -> tuple[Count, Count]:
    total: Count = 0.0
    count: Count = 0.0
    # A shard without rows has nothing to add, but its replica must be there when batch norm meets the others, or when
    # they borrow its weights.
    if rows or setup.module.has_sync_batchnorm or setup.module.shares_weights:
        batch = unpack_labelled(item)
        with setup.precision.autocast(), keep_logits_sharded():
            outputs = call_module(setup.module, batch.x)
            total, count = _sums(setup, state, outputs, batch, rows)
        _update_metrics(state, outputs, batch, rows)
    scale = setup.precision.scale(context, count)
    if isinstance(total, Tensor):
        _check_graph(total)
        torch.autograd.backward(total if scale is None else total * scale.to(total.device, non_blocking=True))
        total = total.detach()
    return total, count


def _train_in_stages(
    setup: TrainSetup, pipeline: Pipelined, state: ReplicaState, item: Any, rows: int
) -> tuple[Count, Count]:
    """The sums of this replica's shard where this worker has the last stage; else nothing, and others tell."""
    if not rows and not setup.module.shares_weights:
        return 0.0, 0.0
    batch = unpack_labelled(item)
    sums = _MicrobatchSums(setup, state, batch)
    setup.module.note_pass()
    with setup.precision.autocast(), keep_logits_sharded():
        pipeline.train(batch.x, rows, sums.examine)
    return sums.total, sums.count


def update_weights(setup: TrainSetup, state: ReplicaState, context: ReplicaContext) -> StepResult:
    """Sums gradients and losses over the replicas, divides once, updates. Every replica must call it."""
    if setup.optimizer is None:
        raise UsageError("there is no optimizer; give one to model.compile(optimizer=...)")
    totals = Totals(total=state.total, count=state.count)
    state.forget()
    return setup.optimizer.update(
        context, totals=totals, clip_norm=setup.config.clip_norm, scaler=setup.precision.scaler
    )


def finish_cycle(setup: TrainSetup, state: ReplicaState) -> StepResult:
    """The update of an accumulation cycle that the end of the epoch cut short. Every replica must call it."""
    return update_weights(setup, state, _context())


def clear_gradients(setup: TrainSetup, state: ReplicaState) -> None:
    """Drops gradients and sums that something before this fit left behind."""
    state.forget()
    if setup.optimizer is not None:
        setup.optimizer.zero_grad()


def evaluate_step(setup: TrainSetup, state: ReplicaState, item: Any) -> StepOutput:
    """The loss and metrics of this replica's shard; the caller has switched gradients off."""
    rows = batch_rows(item)
    if not rows and not setup.module.shares_weights:
        return StepOutput(rows=0, total=0.0, count=0.0)
    batch = unpack_labelled(item)
    if setup.module.pipeline is not None:
        sums = _MicrobatchSums(setup, state, batch)
        with setup.precision.autocast(), keep_logits_sharded():
            setup.module.pipeline.evaluate(batch.x, rows, sums.examine)
        return StepOutput(rows=rows, total=sums.total, count=sums.count)
    with setup.precision.autocast(), keep_logits_sharded():
        outputs = call_module(setup.module, batch.x)
        total, count = _sums(setup, state, outputs, batch, rows)
    _update_metrics(state, outputs, batch, rows)
    return StepOutput(rows=rows, total=total, count=count)


def predict_step(module: MirroredModule, precision: Precision, item: Any) -> Prediction:
    """The module's outputs for this replica's shard; the caller has switched gradients off."""
    x = unpack_inputs(item)
    rows = batch_rows(x)
    if not rows and not module.shares_weights:
        return Prediction(rows=0)
    with precision.autocast():
        if module.pipeline is None:
            outputs = call_module(module, x)
            return Prediction(rows=rows, outputs=outputs if rows else None)
        parts: list[Any] = []
        _check_microbatches(x)
        module.pipeline.evaluate(x, rows, lambda outputs, _: _kept(parts, outputs))
    if not parts:  # another worker has the last stage
        return Prediction(rows=0)
    return Prediction(rows=rows, outputs=tree_map(lambda *leaves: torch.cat(leaves), *parts))


class _MicrobatchSums:
    """What the microbatches of a shard add up to, on the worker that has their outputs."""

    def __init__(self, setup: TrainSetup, state: ReplicaState, batch: LabelledBatch) -> None:
        _check_microbatches(batch.x)
        self._setup, self._state, self._batch = setup, state, batch
        self.total: Count = 0.0
        self.count: Count = 0.0

    def examine(self, outputs: Any, rows: slice) -> Tensor:
        """The loss of some rows of the shard, which are counted."""
        number = rows.stop - rows.start
        y, weight = map_leaves(
            lambda _, leaf: take_rows(leaf, rows.start, number) if leaf_has_rows(leaf) else leaf,
            (self._batch.y, self._batch.sample_weight),
        )
        part = LabelledBatch(self._batch.x, y, weight)
        total, count = _sums(self._setup, self._state, outputs, part, number)
        _update_metrics(self._state, outputs, part, number)
        if torch.is_grad_enabled():
            _check_graph(total)
        self.total, self.count = self.total + total.detach(), self.count + count
        return total


def _check_microbatches(x: Any) -> None:
    for name, leaf in named_leaves(x):
        if leaf_has_rows(leaf) and not is_plain(leaf):
            raise DataError(
                f"a pipeline divides a shard into microbatches of tensors, and {name} of the inputs is a "
                f"{'list of rows' if isinstance(leaf, (list, tuple)) else type(leaf).__name__}; give "
                "one tensor, padded to one length"
            )


def _kept(parts: list[Any], outputs: Any) -> Tensor:
    parts.append(outputs)
    return torch.zeros(())


def _sums(
    setup: TrainSetup, state: ReplicaState, outputs: Any, batch: LabelledBatch, rows: int
) -> tuple[Tensor, Count]:
    if not rows:
        return no_examples(_first_float(outputs))
    context = _context()
    divided = context.num_replicas_in_sync > 1 or setup.module.pipeline is not None
    sums = state.loss.sums(setup.config.loss, outputs, batch, rows, context, divided=divided)
    return sums.total, sums.count


def _update_metrics(state: ReplicaState, outputs: Any, batch: LabelledBatch, rows: int) -> None:
    if not rows or not state.metrics:
        return
    detached = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
    divided = has_sharded_logits(detached)
    if not state.metrics_checked:
        _check_metrics(state, ShardRows(detached, batch, rows), divided)
    for name, metric in state.metrics.items():
        try:
            metric.update(detached, batch.y)
            if divided:
                gather_states(metric)
        except Exception as error:
            error.add_note(f"metric {name!r}, updated with (outputs, targets)")
            raise


def _check_metrics(state: ReplicaState, shard: ShardRows, divided: bool) -> None:
    context = _context()
    waits = context.device.kind == "CPU" and shard.rows < LEAST_ROWS
    state.metrics_checked = not waits
    if not waits and not divided and shard.rows >= LEAST_ROWS and context.num_replicas_in_sync > 1:
        check_metrics_additive(state.metrics, shard, context)


def _check_graph(total: Tensor) -> None:
    if not total.requires_grad:
        raise ConfigError(
            "the loss depends on no trained parameter; compute it from the module's outputs without detach, .item() or"
            " NumPy, and leave at least one parameter with requires_grad"
        )


def _first_float(outputs: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return leaves[0]


def _context() -> ReplicaContext:
    context = get_replica_context()
    if context is None:
        raise UsageError("a step was called outside a replica; call it through strategy.run")
    return context


def _double(value: Count) -> Count:
    return value.detach().to(torch.float64) if isinstance(value, Tensor) else value
