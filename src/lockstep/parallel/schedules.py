"""torch's schedules by our names: made for the stages of a worker, and asked what each worker does in what order."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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

from lockstep.parallel.microbatches import Pipelining, ScheduleName
from lockstep.parallel.timetable import Action, ActionKind, Orders

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
    pipelining: Pipelining, stages: Sequence[PipelineStage], loss: LossOfPart, *, backward: bool
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


def orders_of(pipelining: Pipelining) -> Orders:
    """What each worker does in a step of training, in order, as torch's schedule has computed it.

    Example:
        >>> orders = orders_of(Pipelining(schedule="1f1b", microbatches=2, workers=2))
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
