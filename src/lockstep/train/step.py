"""The functions that run in each replica: one training step, one evaluation step, one prediction step.

    shard -> forward -> (total, count) -> backward of the total -> [update: sums over the replicas, divided once]

The loops in ``fit.py`` and ``inference.py`` run outside the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction, tree_leaves, tree_map
from lockstep.data.sharding import batch_rows
from lockstep.data.structure import is_plain, leaf_has_rows, map_leaves, named_leaves, take_rows
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.mirroring.gradients.local_sum import Number
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.update import StepResult
from lockstep.parallel.vocab_parallel import has_sharded_logits, keep_logits_sharded
from lockstep.replicas.watcher import Totals
from lockstep.train.batch import (
    LabelledBatch,
    ShardRows,
    Sums,
    module_arguments,
    replica_of_step,
    unpack_inputs,
    unpack_labelled,
)
from lockstep.train.classification import ShiftedAccuracy
from lockstep.train.compile import Precision, TrainSetup
from lockstep.train.label_shift import shifted, shifts_labels, traced_shift
from lockstep.train.loss_reduction import ReductionTracer
from lockstep.train.loss_totals import checked_sums, no_examples, refuse_mixed_rows
from lockstep.train.metrics import LEAST_ROWS, check_metrics_additive, gather_states, update_metric
from lockstep.train.module_loss import module_loss_sums
from lockstep.train.string_identifiers import ModuleLoss, logits_of, takes_tensors
from lockstep.train.user_step import TrainStep, UserStep, run_user_step
from lockstep.watch.row_dependence import current_row_watch

if TYPE_CHECKING:
    from lockstep.parallel.pipeline import Pipeline


# Made once: a step of small layers takes half a millisecond.
_NO_BLOCK: AbstractContextManager[object] = nullcontext()
_NO_TRACER: AbstractContextManager[ReductionTracer | None] = nullcontext()


class ReplicaState:
    """What one replica keeps from step to step: its metrics by name, and its sums since the last update."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics
        self.metrics_checked = not metrics
        self.labels_shift: bool | None = None  # whether the module's own loss shifts labels; None: not known yet
        self.losses = 0  # how many shards, or microbatches, had a loss
        self.sums = Totals(0.0, 0.0)

    def add(self, total: Number, count: Number) -> None:
        """Adds the sums of one step, in double precision."""
        # In double precision, as the sums of an epoch grow and the losses that are added to them do not.
        on_cpu = replica_of_step().device.kind == "CPU"
        total, count = _double(total, on_cpu=on_cpu), _double(count, on_cpu=on_cpu)
        self.sums = Totals(self.sums.total + total, self.sums.count + count)

    def take_sums(self) -> Totals:
        """The sums, which begin again at 0."""
        sums, self.sums = self.sums, Totals(0.0, 0.0)
        return sums


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One replica's result of a step: its rows, the total and count of its losses, and the update if there was one."""

    rows: int
    total: Number
    count: Number
    update: StepResult | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One replica's result of a prediction step: its rows, and the module's outputs for them; None for no rows."""

    rows: int
    outputs: Any = None


def train_step(setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    """Forward and backward on this replica's shard, then the update if it is due. Every replica must call it."""
    rows, module = batch_rows(item, is_item=True), setup.module
    total: Number = 0.0
    count: Number = 0.0
    # Between updates nothing is sent to other workers: the gradients of a cycle are exchanged once.
    with _NO_BLOCK if update else module.no_sync():
        # A shard without rows adds nothing, but its replica must run the module if others wait for it there: batch norm
        # over all replicas, or weights that are sharded.
        if rows or module.shards_weights or (module.has_sync_batchnorm and module.pipeline is None):
            batch = unpack_labelled(item, by_module=isinstance(setup.config.loss, ModuleLoss))
            if module.pipeline is not None:
                total, count = _pipeline_sums(setup, module.pipeline, state, batch, rows)
            elif setup.train_step is not None:
                total, count = _user_step_sums(setup, setup.train_step, state, batch, rows)
            else:
                args, kwargs = module_arguments(batch.x)
                with _forward_block(setup):
                    with _loss_tracer(setup) as tracer:
                        outputs = module(*args, **kwargs)
                    total, count = _sums(setup, state, tracer, outputs, batch, rows)
                _update_metrics(setup, state, outputs, batch, rows)
        if module.pipeline is None:  # whose stages have run backward already
            scale = setup.precision.scale(replica_of_step(), count)
            if isinstance(total, Tensor):
                _check_graph(total)
                # The total, and not a mean: the update divides once, by the counts of all replicas, which are not known
                # here.
                torch.autograd.backward(total if scale is None else total * scale.to(total.device, non_blocking=True))
                refuse_mixed_rows(setup.config.loss, combines_rows=setup.config.combines_rows)
                total = total.detach()
    state.add(total, count)
    result = update_weights(setup, state) if update else None
    return StepOutput(rows=rows, total=total, count=count, update=result)


def evaluate_step(setup: TrainSetup, state: ReplicaState, item: Any) -> StepOutput:
    """The loss and metrics of this replica's shard. The caller has switched gradients off."""
    rows = batch_rows(item, is_item=True)
    if not rows and not setup.module.shards_weights:
        return StepOutput(rows=0, total=0.0, count=0.0)
    batch = unpack_labelled(item, by_module=isinstance(setup.config.loss, ModuleLoss))
    if setup.module.pipeline is not None:
        total, count = _pipeline_sums(setup, setup.module.pipeline, state, batch, rows)
    elif setup.test_step is not None:
        total, count = _user_step_sums(setup, setup.test_step, state, batch, rows)
    else:
        args, kwargs = module_arguments(batch.x)
        with _forward_block(setup):
            with _loss_tracer(setup) as tracer:
                outputs = setup.module(*args, **kwargs)
            total, count = _sums(setup, state, tracer, outputs, batch, rows)
        _update_metrics(setup, state, outputs, batch, rows)
    if (watch := current_row_watch()) is not None:
        watch.check_total(total)
        refuse_mixed_rows(setup.config.loss, combines_rows=setup.config.combines_rows)
    return StepOutput(rows=rows, total=total, count=count)


def predict_step(module: MirroredModule, precision: Precision, item: Any) -> Prediction:
    """The module's outputs for this replica's shard. The caller has switched gradients off."""
    x = unpack_inputs(item)
    rows = batch_rows(x)
    if not rows and not module.shards_weights:
        return Prediction(rows=0)
    with precision.autocast():
        if module.pipeline is None:
            args, kwargs = module_arguments(x)
            outputs = module(*args, **kwargs)
            if (watch := current_row_watch()) is not None:
                watch.check_outputs(outputs)
                refuse_mixed_rows(None)
            return Prediction(rows=rows, outputs=outputs if rows else None)
        parts: list[Any] = []

        def keep(outputs: Any, _: slice) -> Tensor:
            parts.append(outputs)
            return torch.zeros(())

        _check_microbatches(x)
        module.pipeline.evaluate(x, rows, keep)
    if not parts:  # another worker has the last stage
        return Prediction(rows=0)
    return Prediction(rows=rows, outputs=tree_map(lambda *leaves: torch.cat(leaves), *parts))


def update_weights(setup: TrainSetup, state: ReplicaState) -> StepResult:
    """Sums gradients and losses over the replicas, divides once, and updates. Every replica must call it."""
    if setup.optimizer is None:
        raise UsageError("there is no optimizer; give one to model.compile(optimizer=...)")
    clip_norm, scaler = setup.config.clip_norm, setup.precision.scaler
    return setup.optimizer.update(replica_of_step(), totals=state.take_sums(), clip_norm=clip_norm, scaler=scaler)


def _user_step_sums(
    setup: TrainSetup, user_step: UserStep, state: ReplicaState, batch: LabelledBatch, rows: int
) -> tuple[Number, Number]:
    """The sums of a shard's loss by the user's ``train_step`` or ``test_step``; updates the metrics."""
    with _forward_block(setup):
        loss = run_user_step(user_step, TrainStep(batch, rows, setup.module, partial(_loss_sums, setup, state)))
    _update_metrics(setup, state, loss.outputs, loss.batch, loss.rows)
    return loss.sums


def _pipeline_sums(
    setup: TrainSetup, pipeline: Pipeline, state: ReplicaState, batch: LabelledBatch, rows: int
) -> tuple[Number, Number]:
    """The sums of a shard, 0 before the last stage. With gradients switched on, all stages run backward too."""
    trains = torch.is_grad_enabled()
    sums: list[tuple[Number, Number]] = [(0.0, 0.0)]

    def add(outputs: Any, part: slice) -> Tensor:
        """Adds the microbatch of these rows, on the worker that has the last stage, and returns its total loss."""
        number = part.stop - part.start
        with DisableTorchFunction():  # nothing is computed here
            microbatch = LabelledBatch(
                batch.x, _rows(batch.y, part.start, number), _rows(batch.sample_weight, part.start, number)
            )
        total, count = _loss_sums(setup, state, outputs, microbatch, number)
        _update_metrics(setup, state, outputs, microbatch, number)
        with DisableTorchFunction():
            if trains:
                _check_graph(total)
            sums.append((total.detach(), count))
        return total

    _check_microbatches(batch.x)
    if trains:
        setup.module.note_pass()
    with _forward_block(setup):
        (pipeline.train if trains else pipeline.evaluate)(batch.x, rows, add)
    totals, counts = zip(*sums, strict=True)
    with DisableTorchFunction():
        return sum(totals), sum(counts)


def _rows(values: Any, start: int, size: int) -> Any:
    """The rows of a structure, such as the targets of a shard, that belong to a microbatch."""
    # What targets mostly are comes first, without a walk: this is done for each microbatch.
    if values is None or (type(values) is Tensor and values.ndim):
        return None if values is None else take_rows(values, start, size)
    return map_leaves(lambda _, leaf: take_rows(leaf, start, size) if leaf_has_rows(leaf) else leaf, values)


def _check_microbatches(x: Any) -> None:
    if type(x) is Tensor and is_plain(x):  # what inputs mostly are, without a walk
        return
    for name, leaf in named_leaves(x):
        if leaf_has_rows(leaf) and not is_plain(leaf):
            kind = "list of rows" if isinstance(leaf, (list, tuple)) else type(leaf).__name__
            raise DataError(
                f"a pipeline divides a shard into microbatches of tensors, and {name} of the inputs is a {kind}; give "
                "one tensor, padded to one length"
            )


def _forward_block(setup: TrainSetup) -> AbstractContextManager[object]:
    """The block of a forward pass and its loss: autocast, and logits that stay divided where workers divide them."""
    if setup.precision.is_plain and not setup.module.is_part:
        return _NO_BLOCK
    return _block_with_autocast(setup)


@contextmanager
def _block_with_autocast(setup: TrainSetup) -> Iterator[None]:
    with setup.precision.autocast(), keep_logits_sharded():
        yield


def _loss_tracer(setup: TrainSetup) -> AbstractContextManager[ReductionTracer | None]:
    """The block of a forward pass: it traces a loss that the module computes itself."""
    return ReductionTracer() if isinstance(setup.config.loss, ModuleLoss) else _NO_TRACER


def _sums(
    setup: TrainSetup,
    state: ReplicaState,
    tracer: ReductionTracer | None,
    outputs: Any,
    batch: LabelledBatch,
    rows: int,
) -> Sums:
    """The sums of the loss of outputs, or of the one among them, which the tracer has seen computed."""
    if tracer is None or not rows:
        return _loss_sums(setup, state, outputs, batch, rows)
    state.losses += 1
    if state.metrics and state.labels_shift is None:
        state.labels_shift = traced_shift(tracer.label_means, batch.y)
    shard = ShardRows(batch.x, batch, rows)
    return module_loss_sums(setup.module, tracer, outputs, shard, replica_of_step(), state.losses)


def _loss_sums(setup: TrainSetup, state: ReplicaState, outputs: Any, batch: LabelledBatch, rows: int) -> Sums:
    if not rows:
        floating = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        # A zero that is connected to the outputs: backward runs through it, so this replica takes part in every
        # exchange that others wait for there.
        return no_examples(min(floating, key=Tensor.numel))  # without elements: a loss that the module computed is NaN
    context = replica_of_step()
    sharded = setup.module.pipeline is not None or context.num_replicas_in_sync > 1
    if setup.config.loss_takes_tensors:
        outputs = logits_of(outputs)
    state.losses += 1
    shard = ShardRows(outputs, batch, rows)
    combines = setup.config.combines_rows
    return checked_sums(setup.config.loss, shard, context, sharded=sharded, step=state.losses, combines_rows=combines)


def update_metrics(state: ReplicaState, inputs: Iterable[tuple[Any, Any]]) -> None:
    """Updates the metrics of one replica with (outputs, targets). An error gets a note that names the metric."""
    for outputs, targets in inputs:
        sharded = has_sharded_logits(outputs)
        for name, metric in state.metrics.items():
            try:
                if state.labels_shift and takes_tensors(metric) and not isinstance(metric, ShiftedAccuracy):
                    update_metric(metric, *shifted(outputs, targets))
                else:
                    update_metric(metric, outputs, targets)
                if sharded:
                    gather_states(metric)
            except Exception as error:
                error.add_note(f"metric {name!r}, updated with (outputs, targets)")
                raise


def _update_metrics(setup: TrainSetup, state: ReplicaState, outputs: Any, batch: LabelledBatch, rows: int) -> None:
    if not rows or not state.metrics:
        return
    # A metric that keeps its outputs would keep the graph of every step alive.
    detached = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
    if not state.metrics_checked:  # once; on a CPU, a shard that is too small leaves it to a later step
        context, enough = replica_of_step(), rows >= LEAST_ROWS
        # On a GPU the comparison makes the host wait, so there it is made in the first step or not at all.
        state.metrics_checked = enough or context.device.kind != "CPU"
        if enough and not has_sharded_logits(detached) and context.num_replicas_in_sync > 1:
            check_metrics_additive(state.metrics, ShardRows(detached, batch, rows), context)
    if state.labels_shift is None:  # a loss of torch compares what the metrics compare
        state.labels_shift = not setup.config.loss_takes_tensors and shifts_labels(detached, batch.y)
    update_metrics(state, [(detached, batch.y)])


def _check_graph(total: Tensor) -> None:
    if not total.requires_grad:
        raise ConfigError(
            "the loss depends on no trained parameter; compute it from the module's outputs without detach, .item() or"
            " NumPy, and leave at least one parameter with requires_grad"
        )


def _double(value: Number, *, on_cpu: bool) -> Number:
    if not isinstance(value, Tensor):
        return value
    if not on_cpu:
        return value.detach().to(torch.float64)
    # On a CPU nobody is waited for, and two sums of tensors would take 20 us a step. The row watch would take this read
    # for one of the program's.
    with DisableTorchFunction():
        return float(value.item())
