"""A replica's pipeline: torch's schedules over the stages, given a shard and a function of the outputs.

    shard -> microbatches of equal length, the last ones padded -> schedule: forward, backward -> gradients
                         last stage: outputs of a microbatch, without padding -> loss

All workers of the replica see the same shard, so inputs beside the hidden states need not be sent.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from lockstep._torch_compat import tree_map, tree_unflatten
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import DataError
from lockstep.parallel.forward_inputs import ForwardArguments
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName
from lockstep.parallel.pipeline_stage import Stage, TracedStage
from lockstep.parallel.pipeline_trace import Action, ActionKind, Orders, PipelineTrace, Slot

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
_TOKENS = "input_ids"
_MOST_KEPT = 8


def orders_of(pipelining: PipelineConfig) -> Orders:
    """The actions of each worker in a training step, in order, from torch's schedule."""
    kind: Any = _KINDS[pipelining.schedule]
    stages = [_StageOutline(pipelining.workers, pipelining.stages) for _ in range(pipelining.stages_per_worker)]
    made = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, pipelining.microbatches)
    return [_numbered(made.pipeline_order[worker]) for worker in range(pipelining.workers)]


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
    taken: Counter[tuple[ActionKind, int]] = Counter()
    found = []
    for each in order:
        kind = None if each is None else _ACTIONS.get(each.computation_type.value)
        if kind is not None:
            found.append(Action(kind=kind, stage=each.stage_index, microbatch=taken[kind, each.stage_index]))
            taken[kind, each.stage_index] += 1
    return found


@contextmanager
def without_its_log() -> Iterator[None]:
    """A block in which torch does not log the whole schedule beside an error that it raises."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        yield
    finally:
        _LOG.disabled = before


class Pipeline:
    """The schedules of one model on this worker.

    Args:
        stages: this worker's, in the order of their numbers.
        pipelining: the schedule, and the number of microbatches.
        group: the workers of all stages of this part of the model, in the order of the pipeline.
        hidden, dtype: the width and the dtype of the hidden states.

    Attributes:
        after_backward: called after each backward pass: where the backward is split, autograd calls no hooks.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        pipelining: PipelineConfig,
        *,
        group: dist.ProcessGroup,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stages, self._group = tuple(stages), group
        self._arguments = ForwardArguments(self._stages[0].model.forward)
        self._pipelining = pipelining
        self.after_backward: Callable[[], None] = lambda: None
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._schedules: dict[tuple[Any, ...], Schedule] = {}
        self._examine: Examine | None = None
        self._rows = 0
        self._slots: list[Slot] = []  # the actions of the last pass, in seconds of ``time.perf_counter()``

    @property
    def is_last(self) -> bool:
        """Whether this worker has the model's outputs."""
        return any(stage.last for stage in self._stages)

    def train(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward and backward of a shard. All workers must call it, with the same shard.

        Args:
            x: the model's inputs, "input_ids" among them: a dict of keyword arguments, a tuple or list of positional
                ones, or the first one alone.
            rows: the number of rows, at least one.
            examine: called where the outputs are, for each microbatch that has rows.
        """
        self._pass(x, rows, examine, backward=True)
        self.after_backward()

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard. All workers must call it."""
        self._pass(x, rows, examine, backward=False)

    def trace(self, group: Communicator) -> PipelineTrace:
        """The actions of all workers in the last pass, each on its own clock. All workers of ``group`` must call it."""
        own = [(*vars(slot.action).values(), slot.begin, slot.end) for slot in self._slots]
        workers = [
            tuple(
                Slot(action=Action(kind=kind, stage=stage, microbatch=microbatch), begin=begin, end=end)
                for kind, stage, microbatch, begin, end in slots
            )
            for slots in all_gather_object(group, "the pipeline trace", own)
        ]
        return PipelineTrace(workers=tuple(workers))

    def _pass(self, x: Any, rows: int, examine: Examine, *, backward: bool) -> None:
        microbatches = self._pipelining.microbatches
        part = -(-rows // microbatches)
        tokens, named = tree_map(lambda leaf: _padded(leaf, rows, part * microbatches), self._inputs(x))
        schedule = self._schedule((part, *tokens.shape[1:]), tokens.dtype, backward=backward)
        self._examine, self._rows = examine, rows
        self._slots.clear()
        given = (tokens,) if self._stages[0].first else ()
        numbers = torch.arange(len(tokens))
        run = schedule.step if backward else schedule.eval
        try:
            with without_its_log():
                run(
                    *given,
                    target=numbers if self.is_last else None,
                    losses=[] if self.is_last else None,
                    return_outputs=False,
                    real=numbers < rows,
                    **named,
                )
        finally:
            self._examine = None

    def _inputs(self, x: Any) -> tuple[Tensor, dict[str, Any]]:
        named = self._arguments.of_inputs(x)
        if not isinstance(tokens := named.pop(_TOKENS, None), Tensor):
            kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in named.items())
            raise DataError(
                f'a pipeline begins with the tensor "{_TOKENS}", and the other inputs are {kinds or "none"}; give that '
                "tensor alone, first, or in a dict of the model's keyword arguments"
            )
        return tokens, named

    def _schedule(self, shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool) -> Schedule:
        """The schedule for microbatches of this shape; its buffers are kept for the latest shapes."""
        key = (shape, backward)
        found = self._schedules.pop(key, None)
        if found is None:
            found = self._make_schedule(shape, dtype, backward=backward)
            while len(self._schedules) >= _MOST_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
        self._schedules[key] = found
        return found

    def _make_schedule(self, shape: tuple[int, ...], dtype: torch.dtype, *, backward: bool) -> Schedule:
        hidden = torch.empty(*shape, self._hidden, dtype=self._dtype, device="meta", requires_grad=backward)
        tokens = torch.empty(shape, dtype=dtype, device="meta")
        stages: list[Any] = [
            TracedStage(
                stage, self._pipelining.stages, group=self._group, takes=tokens if stage.first else hidden,
                gives=hidden, slots=self._slots, device=self._device,
            )
            for stage in self._stages
        ]  # fmt: skip
        kind, microbatches = _KINDS[self._pipelining.schedule], self._pipelining.microbatches
        if issubclass(kind, PipelineScheduleSingle):
            # Without a backward pass GPipe lets every stage go on at once.
            single = kind if backward else torch_pipelining.ScheduleGPipe
            return single(stages[0], microbatches, loss_fn=self._loss, scale_grads=False)
        made = kind(stages, microbatches, loss_fn=self._loss, scale_grads=False)
        if not backward:
            _leave_out_backward(made)
        return made

    def _loss(self, leaves: tuple[Tensor, ...], numbers: Tensor) -> Tensor:
        """The loss of one microbatch of rows with these numbers, whose padding the stage has left out."""
        begin, end = int(numbers[0]), min(int(numbers[-1]) + 1, self._rows)
        if begin >= end or self._examine is None:
            return leaves[0].sum() * 0.0
        spec = self._stages[-1].outputs
        outputs = tree_unflatten(list(leaves), spec) if spec is not None else leaves
        loss = self._examine(outputs, slice(begin, end))
        if self._slots:  # the loss is part of the last forward pass
            self._slots[-1] = replace(self._slots[-1], end=time.perf_counter())
        return loss.clone() if loss._is_view() else loss  # torch detaches it in place, which a view refuses


def _leave_out_backward(made: Any) -> None:
    """For ``eval``, which skips the backward pass in each stage, but not what two stages of a worker hand over."""
    from torch.distributed.pipelining import schedules

    def skip(action: Any, context: Any) -> None:
        context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)

    for computation in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
        made.register_custom_function(computation, skip)


def _padded(leaf: Any, rows: int, length: int) -> Any:
    """A tensor of ``rows`` rows, padded with its first row to ``length``."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows or rows == length:
        return leaf
    return torch.cat([leaf, leaf[:1].expand(length - rows, *leaf.shape[1:])])
