"""torch's stage of a pipeline, which notes when it computed what, and tells the model whose turn it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from lockstep.parallel.stage import Stage
from lockstep.parallel.timetable import Action, ActionKind, Slot


class Notes:
    """What a worker did in a pass, and when, in seconds of ``time.perf_counter()``."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    @contextmanager
    def taking(self, action: Action) -> Iterator[None]:
        """Notes an action with the time that the block took."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.slots.append(Slot(action=action, begin=begin, end=time.perf_counter()))

    def prolong(self) -> None:
        """Counts what was done until now as part of the last action."""
        if self.slots:
            self.slots[-1] = replace(self.slots[-1], end=time.perf_counter())


class WorkerStage(PipelineStage):
    """A stage for microbatches of one shape.

    Args:
        stage: the module.
        stages: how many stages there are in all.
        group: the workers of the pipeline, in their order.
        takes: the shape and dtype of what comes in, on the meta device.
        gives: the same of what goes out; of the last stage it is not used.
        notes: where it is noted what was done.
        device: of the hidden states that come and go.
    """

    def __init__(
        self,
        stage: Stage,
        stages: int,
        *,
        group: dist.ProcessGroup,
        takes: Tensor,
        gives: Tensor,
        notes: Notes,
        device: torch.device,
    ) -> None:
        # With the shapes known, torch need not run a microbatch to find them.
        super().__init__(stage, stage.number, stages, device, input_args=takes, output_args=gives, group=group)
        self._module, self._notes = stage, notes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a microbatch."""
        forward = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self._in_turn("forward", fwd_chunk_id, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch, or the part of it for the stage's inputs."""
        if self.has_backward:
            backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
            self._in_turn("backward" if full_backward else "inputs", bwd_chunk_id, backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of the backward pass for the stage's weights."""
        if self.has_backward:
            backward = partial(super().backward_weight_one_chunk, bwd_chunk_id, last_backward)
            self._in_turn("weights", bwd_chunk_id, backward)

    def _in_turn(self, kind: ActionKind, microbatch: int, compute: Callable[[], Any]) -> Any:
        self._module.take_turn()
        with self._notes.taking(Action(kind=kind, stage=self._module.number, microbatch=microbatch)):
            return _told_plainly(compute)


def _told_plainly(compute: Callable[[], Any]) -> Any:
    """Raises what went wrong itself: torch raises an error of its own from it, which has the shapes of what came in."""
    try:
        return compute()
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        told = error.__cause__
    raise told  # not above, where torch's would become its context and so, in a circle, its cause
