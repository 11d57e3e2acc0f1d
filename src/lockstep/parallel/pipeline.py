"""A replica's pipeline: torch's schedules over the stages, given a shard and a function of the outputs.

    shard -> microbatches, whose rows differ by at most one -> schedule: forward, backward -> gradients
                                        last stage: outputs of a microbatch -> loss

All workers of the replica see the same shard, so the model's inputs need not be sent. What is sent is padded to the
shapes of the largest microbatch; no stage computes padding.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from lockstep._torch_compat import (
    DisableTorchFunction,
    EnableTorchFunction,
    next_sequence_number,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments
from lockstep.parallel.microbatch_state import StateWatch, warn_of_changed
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName
from lockstep.parallel.pipeline_stage import Stage, TracedStage
from lockstep.parallel.pipeline_trace import Action, ActionKind, Orders, PipelineTrace, Slot
from lockstep.parallel.pipeline_values import StageValues, check_values, leaving_no_trace, sendable

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Examine = Callable[[Any, slice], Tensor]
"""Given the outputs for some rows of a shard: the scalar to back-propagate."""

_KINDS: Mapping[ScheduleName, type[Schedule]] = {
    "gpipe": torch_pipelining.ScheduleGPipe,
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zero_bubble_v": torch_pipelining.ScheduleZBVZeroBubble,
}
_LOG = logging.getLogger("torch.distributed.pipelining.schedules")
_ACTIONS: Mapping[str, ActionKind] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
"""By torch's names. torch also has actions that compute nothing."""
# A schedule holds buffers for every microbatch, so data of ever new lengths would fill the memory.
_MOST_SCHEDULES = 8
_MOST_VALUES = 256
WITHOUT_PENALTY = (
    "leave a penalty on weights to the optimizer (weight_decay=, which is that of squares, or a hook of "
    "register_step_pre_hook that adds the penalty's derivative to .grad), and compute in the model's forward what "
    "needs its weights"
)
"""What to do where a loss reads the weights of a divided model."""


def orders_of(pipelining: PipelineConfig) -> Orders:
    """The actions of each worker in a training step, in order, from torch's schedule."""
    kind: Any = _KINDS[pipelining.schedule]
    stages = [_StageOutline(pipelining.workers, pipelining.stages) for _ in range(pipelining.stages_per_worker)]
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, pipelining.microbatches)
    return [_numbered(schedule.pipeline_order[worker]) for worker in range(pipelining.workers)]


@dataclass
class _StageOutline:
    """The attributes of a stage from which a schedule computes its orders; a real one needs process groups."""

    group_size: int
    num_stages: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def _numbered(order: Sequence[Any]) -> list[Action]:
    """Each stage takes microbatches in order, so they are counted; torch 2.13's 1F1B has the last stage's from 1."""
    counts: Counter[tuple[ActionKind, int]] = Counter()
    actions = []
    for step in order:
        kind = None if step is None else _ACTIONS.get(step.computation_type.value)
        if kind is not None:
            actions.append(Action(kind=kind, stage=step.stage_index, microbatch=counts[kind, step.stage_index]))
            counts[kind, step.stage_index] += 1
    return actions


@contextmanager
def without_its_log() -> Iterator[None]:
    """A block in which torch does not log the whole schedule beside an error that it raises."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


@dataclass(frozen=True)
class Microbatch:
    """A part of a shard: the model's inputs by name, for ``rows`` rows from the row ``begin`` on."""

    inputs: dict[str, Any]
    begin: int
    rows: int


@dataclass
class _Pass:
    """One pass of a shard through the stages."""

    microbatches: list[Microbatch]
    values: Mapping[int, list[StageValues]]  # by the number of rows: what each stage gives the next
    most: int  # the rows of the largest microbatch
    examine: Examine
    outputs: dict[int, Any] = field(default_factory=dict)  # of the last stage, by microbatch


class Pipeline:
    """The schedules of one model on this worker.

    Args:
        stages: this worker's, in the order of their numbers.
        pipelining: the schedule, and the number of microbatches.
        group: the workers of all stages of this part of the model, in the order of the pipeline.
        workers: the same workers; also an attribute.

    Attributes:
        is_last: whether this worker has the model's outputs.
        after_backward: called after each backward pass: where the backward is split, autograd calls no hooks.
        weights: the ids of the parameters of this worker's stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pipelining: PipelineConfig,
        *,
        group: dist.ProcessGroup,
        workers: Communicator,
        device: torch.device,
    ) -> None:
        self._stages, self._group, self.workers = tuple(stages), group, workers
        self.is_last = any(stage.last for stage in self._stages)
        self._arguments = ForwardArguments(self._stages[0].model.forward)
        self._pipelining = pipelining
        self.after_backward: Callable[[], None] = lambda: None
        self.weights: frozenset[int] = frozenset()
        self._trained = 0  # passes that train, so far
        self._warned_of_state = False
        self._device = device
        self._values: RecentValues[list[StageValues]] = RecentValues(_MOST_VALUES)
        self._schedules: RecentValues[Schedule] = RecentValues(_MOST_SCHEDULES)
        self._now: _Pass | None = None
        self._slots: list[Slot] = []  # the actions of the last pass, in seconds of ``time.perf_counter()``

    def train(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward and backward of a shard. All workers must call it, with the same shard.

        Args:
            x: the model's inputs: a dict of keyword arguments, a tuple or list of positional ones, or the first one
                alone.
            rows: the number of rows, at least one.
            examine: called where the outputs are, for each microbatch that has rows.
        """
        self._trained += 1
        # Passes 1, 2, 4, 8, ... are watched: to copy and compare all buffers takes time, and a module may begin to
        # count only in a later pass.
        parts = min(rows, self._pipelining.microbatches)
        looks = parts > 1 and not self._warned_of_state and self._trained.bit_count() == 1
        watch = StateWatch(self._stages[0].model) if looks else None
        with DisableTorchFunction():
            self._pass(x, rows, examine, backward=True)
        # Autograd calls no hooks for gradients that a schedule with a split backward computes by itself, so they are
        # handed over here.
        self.after_backward()
        if watch is not None:
            self._warned_of_state = warn_of_changed(watch, self.workers, parts)

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard. All workers must call it."""
        with DisableTorchFunction():
            self._pass(x, rows, examine, backward=False)

    def trace(self) -> PipelineTrace:
        """The actions of all workers in the last pass, each on its own clock. All ``workers`` must call it."""
        local_slots = [(*vars(slot.action).values(), slot.begin, slot.end) for slot in self._slots]
        workers = [
            tuple(
                Slot(action=Action(kind=kind, stage=stage, microbatch=microbatch), begin=begin, end=end)
                for kind, stage, microbatch, begin, end in slots
            )
            for slots in all_gather_object(self.workers, "the pipeline trace", local_slots)
        ]
        return PipelineTrace(workers=tuple(workers))

    def _pass(self, x: Any, rows: int, examine: Examine, *, backward: bool) -> None:
        """Called without function modes, which are on again where code of the user's runs.

        torch's schedules and our bookkeeping draw no random numbers and touch no object of the user's, and the
        replica's mode is Python at each call of torch: a thousand a step of four microbatches.
        """
        microbatches = divided(self._arguments.of_inputs(x), rows, self._pipelining.microbatches)
        # Shards divide into microbatches of at most two sizes and empty ones, so few examples are run for their shapes.
        examples = {microbatch.rows: microbatch for microbatch in microbatches if microbatch.rows}
        values = {number: self._values_for(example, backward=backward) for number, example in examples.items()}
        now = self._now = _Pass(microbatches, values, max(values), examine)
        schedule = self._schedule(values[now.most], backward=backward)
        self._slots.clear()
        run = schedule.step if backward else schedule.eval
        try:
            with without_its_log():
                run(
                    # torch hands the loss function the targets of a microbatch. Here these are its number alone: the
                    # loss looks up outputs and rows, which may be any structure.
                    target=torch.arange(len(microbatches)) if self.is_last else None,
                    losses=[] if self.is_last else None,
                    return_outputs=False,
                )
        finally:
            self._now = None

    def _values_for(self, microbatch: Microbatch, *, backward: bool) -> list[StageValues]:
        """The values between stages for microbatches of this shape: those that each stage but the last gives."""
        return self._values.get(
            (backward, *self._key(microbatch.inputs)),
            lambda: [StageValues(number, values) for number, values in enumerate(self._example(microbatch))],
        )

    def _key(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """A key for what the shapes between stages depend on."""
        leaves, spec = tree_flatten(dict(inputs))
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        # Under autocast a stage sends other dtypes than without, so the precision is part of the key.
        kind = self._device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (repr(spec), tuple(shapes), precision, self._stages[0].key(inputs))

    def _example(self, microbatch: Microbatch) -> list[Any]:
        """Examples of the values between stages, from a forward pass of all stages that changes no state."""
        # Models of transformers send hidden states of a known size, so nothing need be run.
        outputs = self._stages[0].known_values(microbatch.inputs)
        if outputs is not None:
            return [outputs] * (self._pipelining.stages - 1)
        examples: list[Any] = []
        values: Any = ()
        for number in range(self._pipelining.stages - 1):
            stages = [stage for stage in self._stages if stage.number == number]
            # A worker that fails sends its error in place of an example, so that all workers raise it and none waits
            # for a tensor.
            attempt = self._try_stage(stages[0], values, microbatch.inputs) if stages else ((), "")
            gathered = all_gather_object(self.workers, f"what stage {number} gives the next", attempt)
            output, fault = gathered[self._pipelining.worker_of(number)]
            if fault:
                raise ConfigError(fault)
            values = tree_map(self._on_device, output)
            examples.append(values)
        return examples

    def _try_stage(self, stage: Stage, values: Any, inputs: Mapping[str, Any]) -> tuple[Any, str]:
        """The values that a stage gives the next, and an error text, which is empty if they can be sent."""
        values, named = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (tuple(values), dict(inputs))
        )
        stage.activate()
        with leaving_no_trace(stage.model, self._device):
            try:
                with EnableTorchFunction():
                    values = stage(*values, inputs=named)
                check_values(stage.number, values)
            except ConfigError as error:
                return (), str(error)
            return sendable(values), ""

    def _on_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(self._device).requires_grad_(leaf.requires_grad)

    def _schedule(self, values: list[StageValues], *, backward: bool) -> Schedule:
        """The schedule for microbatches of these shapes; its buffers are kept for the latest ones."""
        # A schedule allocates the buffers that it receives into, of fixed shapes.
        shapes = tuple(
            (tensor.shape, tensor.dtype, tensor.requires_grad)
            for stage_values in values
            for tensor in stage_values.tensors
        )
        return self._schedules.get((shapes, backward), lambda: self._make_schedule(values, backward=backward))

    def _make_schedule(self, values: list[StageValues], *, backward: bool) -> Schedule:
        between = [[], *(stage_values.tensors for stage_values in values), []]
        stages: list[Any] = [
            TracedStage(
                stage, self._pipelining.stages, group=self._group, run=self._run, takes=between[stage.number],
                gives=between[stage.number + 1], slots=self._slots, device=self._device,
            )
            for stage in self._stages
        ]  # fmt: skip
        kind, microbatches = _KINDS[self._pipelining.schedule], self._pipelining.microbatches
        # scale_grads=False: by default torch divides gradients by the number of microbatches, and the loss is divided
        # by the global batch already.
        if issubclass(kind, PipelineScheduleSingle):
            # Without a backward pass GPipe lets every stage go on at once.
            single = kind if backward else torch_pipelining.ScheduleGPipe
            return single(stages[0], microbatches, loss_fn=self._loss, scale_grads=False)
        schedule = kind(stages, microbatches, loss_fn=self._loss, scale_grads=False)
        if not backward:
            _leave_out_backward(schedule)
        return schedule

    def _run(self, stage: Stage, received: Sequence[Tensor], number: int) -> tuple[Tensor, ...]:
        """Computes one microbatch in one stage; returns what is sent, and of the last stage the outputs' tensors."""
        assert self._now is not None
        microbatch, values = self._now.microbatches[number], self._now.values
        if not microbatch.rows:
            return self._nothing(stage, received)
        arguments = [] if stage.first else values[microbatch.rows][stage.number - 1].take(received)
        with EnableTorchFunction():
            outputs = stage(*arguments, inputs=microbatch.inputs)
        if not stage.last:
            padded = values[self._now.most][stage.number].tensors
            return values[microbatch.rows][stage.number].give(outputs, padded)
        self._now.outputs[number] = outputs
        if type(outputs) is Tensor:  # without a walk, for each microbatch
            return (outputs,)
        return tuple(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))

    def _nothing(self, stage: Stage, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Zeros in place of a microbatch without rows, whose gradients are zero."""
        assert self._now is not None
        # The zero depends on what was received. Without that the stage before would wait for a gradient that never
        # comes: torch's schedules run each backward action, whether or not the microbatch has rows.
        through = [tensor.sum() * 0.0 for tensor in received if tensor.requires_grad]
        zero = sum(through, start=torch.zeros((), device=self._device))
        if stage.last:
            return (zero,)
        blank = self._now.values[self._now.most][stage.number].tensors
        zeros = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in blank]
        if not through:
            return tuple(value.requires_grad_(like.requires_grad) for value, like in zip(zeros, blank, strict=True))
        return tuple(
            value + zero.to(value.dtype) if like.requires_grad else value
            for value, like in zip(zeros, blank, strict=True)
        )

    def _loss(self, leaves: Any, numbers: Tensor) -> Tensor:
        """The loss of the microbatch of this number."""
        assert self._now is not None
        number = int(numbers[0])
        microbatch = self._now.microbatches[number]
        if not microbatch.rows:
            return torch.stack(list(leaves)).sum()
        outputs, begin = self._now.outputs.pop(number), next_sequence_number()
        with EnableTorchFunction():
            loss = self._now.examine(outputs, slice(microbatch.begin, microbatch.begin + microbatch.rows))
        # The walk through the graph of a loss takes time, so it is made in passes 1, 2, 4, 8, ...
        if self._trained.bit_count() == 1 and reads_weights(loss, outputs, self.weights, begin):
            raise UsageError(
                "the loss reads weights of the model by themselves, and this worker of the pipeline has those of its "
                f"stages alone, so that a sum over the model's weights leaves others out; {WITHOUT_PENALTY}"
            )
        if self._slots:  # the loss is part of the last forward pass
            self._slots[-1] = replace(self._slots[-1], end=time.perf_counter())
        # torch calls detach_() on the loss, which raises for a view (torch 2.13: "Can't detach views in-place").
        return loss.clone() if loss._is_view() else loss


def reads_weights(loss: Tensor, outputs: Any, weights: Collection[int], begin: int) -> bool:
    """Whether a loss leads to one of these parameters, by their ids, on a way not through the outputs.

    ``begin`` is the number of the first node that autograd has made for the loss; those before are of the outputs.
    """
    # Autograd numbers its nodes in the order of their making. The order tells the loss's nodes from the model's, also
    # where the outputs are objects that hide their tensors from torch's trees.
    output_ids = {id(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
    nodes: list[Any] = [loss.grad_fn]
    visited: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in visited or node._sequence_nr() < begin:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)  # of the node that accumulates a leaf's gradient
        if variable is not None and id(variable) in weights and id(variable) not in output_ids:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def divided(inputs: Mapping[str, Any], rows: int, number: int) -> list[Microbatch]:
    """Divides a shard into ``number`` microbatches, whose rows differ by at most one, the larger ones first."""
    leaves, spec = tree_flatten(dict(inputs))
    has_rows = [isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows for leaf in leaves]
    microbatches, begin = [], 0
    for index in range(number):
        end = begin + rows // number + (index < rows % number)
        part = [leaf[begin:end] if divides else leaf for leaf, divides in zip(leaves, has_rows, strict=True)]
        microbatches.append(Microbatch(tree_unflatten(part, spec), begin, end - begin))
        begin = end
    return microbatches


T = TypeVar("T")


class RecentValues(Generic[T]):
    """A cache of the ``most`` values that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, dict[Any, T]()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not kept."""
        value = self._values.pop(key) if key in self._values else make()
        # dicts keep the order of insertion, so the first key is the one that was asked for longest ago.
        while len(self._values) >= self._most:
            self._values.pop(next(iter(self._values)))
        self._values[key] = value
        return value


def _leave_out_backward(schedule: Any) -> None:
    """Leaves the backward pass out of a schedule for ``eval``.

    torch skips it in each stage, but not the tensors that two stages of one worker hand over.
    """
    from torch.distributed.pipelining import schedules

    def skip(action: Any, context: Any) -> None:
        context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)

    for computation in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
        schedule.register_custom_function(computation, skip)
