"""A replica's pipeline: torch's schedules over the stages, given a shard and what to do with the outputs of its parts.

    shard -> microbatches of equal length, the last ones filled up -> schedule: forward, backward -> gradients
                         last stage: outputs of a microbatch, less what filled it up -> loss

All workers of the replica see the same shard, so inputs beside the hidden states need not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_unflatten

from lockstep.collectives.values import exchange_values
from lockstep.collectives.workers import Workers
from lockstep.errors import DataError
from lockstep.parallel.arguments import Arguments
from lockstep.parallel.filler import with_one_row
from lockstep.parallel.microbatches import Pipelining
from lockstep.parallel.schedules import Schedule, make_schedule, without_its_log
from lockstep.parallel.stage import Stage
from lockstep.parallel.timetable import Action, ActionKind, Slot, Timetable
from lockstep.parallel.worker_stage import Notes, WorkerStage

if TYPE_CHECKING:
    from lockstep.parallel.stage_sharding import Borrowing  # with torch's FSDP, which few ask for

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
        pipelining: Pipelining,
        *,
        group: dist.ProcessGroup,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        borrowing: Borrowing | None = None,
    ) -> None:
        self._stages, self._group = tuple(stages), group
        self._arguments = Arguments(self._stages[0].model.forward)
        self.pipelining = pipelining
        self.settle: Callable[[], None] = _nothing
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._borrowing = borrowing
        self._ready: dict[tuple[Any, ...], Schedule] = {}
        self._examine: Examine | None = None
        self._rows = 0
        self._notes = Notes()

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

    def timetable(self, line: Workers) -> Timetable:
        """When all workers did what in the last pass, on each one's own clock. All of them must call it.

        Args:
            line: the workers, in the order of the pipeline.
        """
        own = [
            [slot.action.kind, slot.action.stage, slot.action.microbatch, slot.begin, slot.end] for slot in self.slots
        ]
        every = exchange_values(line, "the timetable", own)
        return Timetable(workers=tuple(tuple(_slot(*each) for each in slots) for slots in every))

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
        named = dict(given) if rows else with_one_row(given)
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
                WorkerStage(
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
