"""A replica's pipeline: torch's schedules over the stages, given a shard and what to do with the outputs of its parts.

    shard -> microbatches of equal length, the last ones filled up -> schedule: forward, backward -> gradients
                         last stage: outputs of a microbatch, less what filled it up -> loss

All workers of the replica see the same shard, so inputs beside the hidden states need not travel.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from lockstep._torch_compat import tree_map, tree_unflatten
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.errors import DataError
from lockstep.parallel.forward_inputs import ForwardArguments, with_dummy_row
from lockstep.parallel.pipeline_config import PipelineConfig, ScheduleName
from lockstep.parallel.pipeline_stage import Stage, TracedStage, TraceRecorder
from lockstep.parallel.pipeline_trace import Action, ActionKind, Orders, PipelineTrace, Slot

if TYPE_CHECKING:
    from lockstep.parallel.fsdp import StageWeights  # with torch's FSDP, which few ask for


Schedule = PipelineScheduleSingle | PipelineScheduleMulti
LossOfPart = Callable[[Any, Tensor], Tensor]
"""Given the last stage's tensors for a microbatch, and the numbers of its rows: the scalar to back-propagate."""

_KINDS: Mapping[ScheduleName, type[Schedule]] = MappingProxyType(
    {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
        "zero_bubble_v": ScheduleZBVZeroBubble,
    }
)
_LOG = logging.getLogger("torch.distributed.pipelining.schedules")
_ACTIONS: Mapping[str, ActionKind] = MappingProxyType({"F": "forward", "B": "backward", "I": "inputs", "W": "weights"})
"""By what torch calls them; it also has actions that compute nothing."""


def make_schedule(
    pipelining: PipelineConfig, stages: Sequence[PipelineStage], loss: LossOfPart, *, backward: bool
) -> Schedule:
    """The schedule of this worker.

    Args:
        pipelining: the settings.
        stages: that this worker holds, in the order of their numbers.
        loss: of the last stage's outputs.
        backward: whether it is for training; else for ``eval``.
    """
    kind = _KINDS[pipelining.schedule]
    if issubclass(kind, PipelineScheduleSingle):
        # Where nothing comes back, GPipe lets every stage go on at once.
        single = kind if backward else ScheduleGPipe
        return single(stages[0], pipelining.microbatches, loss_fn=loss, scale_grads=False)
    made = kind(list(stages), pipelining.microbatches, loss_fn=loss, scale_grads=False)
    if not backward:
        _leave_out_backward(made)
    return made


def orders_of(pipelining: PipelineConfig) -> Orders:
    """What each worker does in a step of training, in order, as torch's schedule has computed it.

    Example:
        >>> orders = orders_of(PipelineConfig(schedule="1f1b", microbatches=2, workers=2))
        >>> [f"{action.kind} {action.microbatch}" for action in orders[1]]
        ['forward 0', 'backward 0', 'forward 1', 'backward 1']
    """
    kind = _KINDS[pipelining.schedule]
    seats = [_Seat(pipelining.workers, pipelining.stages) for _ in range(pipelining.stages_per_worker)]
    made: Any = kind(
        seats[0] if issubclass(kind, PipelineScheduleSingle) else seats,  # type: ignore[arg-type]
        pipelining.microbatches,
    )
    return [_numbered(made.pipeline_order[worker]) for worker in range(pipelining.workers)]


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
    """Leaves out what torch logs beside an error that it raises: the whole schedule. The error is told anyway.

    What other threads log there stays.
    """
    own = threading.get_ident()

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != own

    _LOG.addFilter(is_others)
    try:
        yield
    finally:
        _LOG.removeFilter(is_others)


@dataclass
class _Seat:
    """What a schedule asks of a stage to compute its orders; a real one needs process groups."""

    group_size: int
    num_stages: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def _leave_out_backward(made: Any) -> None:
    """For ``eval``, which skips the backward pass in each stage, but not what two stages of a worker hand over."""
    from torch.distributed.pipelining import schedules

    def nothing(action: Any, context: Any) -> None:
        context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index), None)

    for computation in (schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
        made.register_custom_function(computation, nothing)


Examine = Callable[[Any, slice], Tensor]
"""Given the outputs for some rows of a shard: the scalar to back-propagate."""
_WORDS = "input_ids"
_MOST_KEPT = 8


class Pipeline:
    """The schedules of one model on this worker.

    Args:
        stages: this worker's, in the order of their numbers.
        pipelining: the schedule, and the number of microbatches.
        group: the workers of all stages of this part of the model, in the order of the pipeline.
        hidden: the width of the hidden states.
        dtype: of the hidden states.
        device: of this worker.
        borrowing: how the stages have the weights that replicas share; None where each has its own.

    Attributes:
        pipelining: the settings.
        settle: called after each backward pass: schedules that divide it leave gradients that autograd tells nobody of.
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
        borrowing: StageWeights | None = None,
    ) -> None:
        self._stages, self._group = tuple(stages), group
        self._arguments = ForwardArguments(self._stages[0].model.forward)
        self.pipelining = pipelining
        self.settle: Callable[[], None] = _nothing
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._borrowing = borrowing
        self._ready: dict[tuple[Any, ...], Schedule] = {}
        self._examine: Examine | None = None
        self._rows = 0
        self._notes = TraceRecorder()

    @property
    def is_last(self) -> bool:
        """Whether this worker has the model's outputs."""
        return any(stage.last for stage in self._stages)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What this worker did in the last pass, and when, in seconds of ``time.perf_counter()``."""
        return tuple(self._notes.slots)

    def train(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward and backward of a shard. All workers must call it, with the same shard.

        Args:
            x: the model's inputs, "input_ids" among them: a dict of keyword arguments, a tuple or list of positional
                ones, or the first one alone.
            rows: of the shard; without any it passes for the sake of those who borrow this worker's weights.
            examine: called where the outputs are, for each microbatch that has rows.
        """
        self._pass(x, rows, examine, backward=True)
        self.settle()

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard. All workers must call it."""
        self._pass(x, rows, examine, backward=False)

    def timetable(self, line: Communicator) -> PipelineTrace:
        """When all workers did what in the last pass, on each one's own clock. All of them must call it.

        Args:
            line: the workers, in the order of the pipeline.
        """
        own = [
            [slot.action.kind, slot.action.stage, slot.action.microbatch, slot.begin, slot.end] for slot in self.slots
        ]
        every = all_gather_object(line, "the timetable", own)
        return PipelineTrace(workers=tuple(tuple(_slot(*each) for each in slots) for slots in every))

    def _pass(self, x: Any, rows: int, examine: Examine, *, backward: bool) -> None:
        words, named = self._inputs(x, rows)
        microbatches, given_rows = self.pipelining.microbatches, max(1, rows)
        part = -(-given_rows // microbatches)
        words, named = tree_map(lambda leaf: _filled(leaf, given_rows, part * microbatches), (words, named))
        schedule = self._schedule((part, *words.shape[1:]), words.dtype, backward=backward)
        self._examine, self._rows = examine, rows
        self._notes.slots.clear()
        given = (words,) if self._stages[0].first else ()
        target = torch.arange(len(words)) if self.is_last else None
        real = torch.arange(len(words)) < rows
        run = schedule.step if backward else schedule.eval
        losses: list[Tensor] | None = [] if self.is_last else None
        try:
            with without_its_log(), self._weights(backward=backward):
                run(*given, target=target, losses=losses, return_outputs=False, real=real, **named)
        finally:
            self._examine = None

    def _inputs(self, x: Any, rows: int) -> tuple[Tensor, dict[str, Any]]:
        """The words, and the other inputs by name."""
        given = self._arguments.of_inputs(x)
        named = dict(given) if rows else with_dummy_row(given)
        words = named.pop(_WORDS, None)
        if not isinstance(words, Tensor):
            kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in given.items())
            raise DataError(
                f'a pipeline begins with the tensor "{_WORDS}", and the inputs that came are {kinds or "none"}; give '
                "that tensor alone, first, or in a dict of the model's keyword arguments"
            )
        return words, named

    def _weights(self, *, backward: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._borrowing is None else self._borrowing.during(backward=backward)

    def _schedule(self, shape: tuple[int, ...], words: torch.dtype, *, backward: bool) -> Schedule:
        """The schedule for microbatches of this shape; its buffers are kept for the shapes that came last."""
        key = (shape, backward)
        ready = self._ready.pop(key, None)
        if ready is None:
            hidden = torch.empty(*shape, self._hidden, dtype=self._dtype, device="meta", requires_grad=backward)
            first = torch.empty(shape, dtype=words, device="meta")
            made = [
                TracedStage(
                    stage,
                    self.pipelining.stages,
                    group=self._group,
                    takes=first if stage.first else hidden,
                    gives=hidden,
                    notes=self._notes,
                    device=self._device,
                )
                for stage in self._stages
            ]
            ready = make_schedule(self.pipelining, made, self._loss, backward=backward)
            while len(self._ready) >= _MOST_KEPT:
                self._ready.pop(next(iter(self._ready)))
        self._ready[key] = ready
        return ready

    def _loss(self, leaves: tuple[Tensor, ...], numbers: Tensor) -> Tensor:
        """What one microbatch adds to the loss; the stage has left out the rows that filled it up."""
        begin, end = int(numbers[0]), min(int(numbers[-1]) + 1, self._rows)
        if begin >= end or self._examine is None:
            return leaves[0].sum() * 0.0
        spec = self._stages[-1].outputs
        outputs = tree_unflatten(list(leaves), spec) if spec is not None else leaves
        loss = self._examine(outputs, slice(begin, end))
        self._notes.prolong()
        return loss.clone() if loss._is_view() else loss  # torch detaches it in place, which a view refuses


def _nothing() -> None:
    """Of a pipeline that nobody waits for."""


def _slot(kind: ActionKind, stage: int, microbatch: int, begin: float, end: float) -> Slot:
    return Slot(action=Action(kind=kind, stage=stage, microbatch=microbatch), begin=begin, end=end)


def _filled(leaf: Any, rows: int, length: int) -> Any:
    """A tensor of ``rows`` rows with its first row repeated behind them."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows or rows == length:
        return leaf
    return torch.cat([leaf, leaf[:1].expand(length - rows, *leaf.shape[1:])])
