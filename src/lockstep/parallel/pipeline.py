"""A replica's pipeline: torch's schedules over the stages, given a shard and what to do with the outputs of its parts.

    shard -> microbatches of equal length, the last ones filled up -> schedule: forward, backward -> gradients
                         last stage: outputs of a microbatch, less what filled it up -> loss

All workers of the replica see the same shard, so inputs beside the hidden states need not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils._pytree import tree_map, tree_unflatten

from lockstep.errors import DataError
from lockstep.parallel.microbatches import Pipelining, ScheduleName
from lockstep.parallel.stage import Stage

_KINDS: Mapping[ScheduleName, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Examine = Callable[[Any, slice], Tensor]
"""Given the outputs for some rows of a shard: the scalar to back-propagate."""
_WORDS = "input_ids"
_MOST_KEPT = 8


class Pipeline:
    """The schedules of one model on this worker.

    Args:
        stage: this worker's.
        number: which one it is.
        stages: how many there are.
        group: the workers of all stages of this part of the model, in the order of the stages.
        pipelining: the schedule, and the number of microbatches.
        hidden: the width of the hidden states.
        dtype: of the hidden states.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        number: int,
        stages: int,
        group: dist.ProcessGroup,
        pipelining: Pipelining,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._stage = stage
        self._number, self._stages, self._group = number, stages, group
        self._kind, self._microbatches = _KINDS[pipelining.schedule], pipelining.microbatches
        self._hidden, self._dtype = hidden, dtype
        self._ready: dict[tuple[Any, ...], PipelineScheduleSingle] = {}
        self._examine: Examine | None = None
        self._rows = 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the model's outputs."""
        return self._number == self._stages - 1

    def train(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward and backward of a shard. All stages must call it, with the same shard of at least one row.

        Args:
            x: the model's keyword arguments, "input_ids" among them.
            rows: of the shard.
            examine: called on the last stage for each microbatch that has rows.
        """
        self._pass(x, rows, examine, self._kind, backward=True)

    def evaluate(self, x: Any, rows: int, examine: Examine) -> None:
        """Forward of a shard. All stages must call it."""
        self._pass(x, rows, examine, ScheduleGPipe, backward=False)

    def _pass(self, x: Any, rows: int, examine: Examine, kind: type[PipelineScheduleSingle], *, backward: bool) -> None:
        words, named = _arguments(x)
        part = -(-rows // self._microbatches)
        words, named = tree_map(lambda leaf: _filled(leaf, rows, part * self._microbatches), (words, named))
        schedule = self._schedule(kind, (part, *words.shape[1:]), words.dtype, backward=backward)
        self._examine, self._rows = examine, rows
        given = (words,) if self._number == 0 else ()
        target = torch.arange(len(words)) if self.is_last else None
        real = torch.arange(len(words)) < rows
        run = schedule.step if backward else schedule.eval
        try:
            run(*given, target=target, losses=[] if self.is_last else None, return_outputs=False, real=real, **named)
        finally:
            self._examine = None

    def _schedule(
        self, kind: type[PipelineScheduleSingle], shape: tuple[int, ...], words: torch.dtype, *, backward: bool
    ) -> PipelineScheduleSingle:
        """The schedule for microbatches of this shape; its buffers are kept for the shapes that came last."""
        key = (kind, shape, backward)
        ready = self._ready.pop(key, None)
        if ready is None:
            hidden = torch.empty(*shape, self._hidden, dtype=self._dtype, device="meta", requires_grad=backward)
            takes = torch.empty(shape, dtype=words, device="meta") if self._number == 0 else hidden
            # With the shapes known, torch's stages need not run a microbatch to find them. The last one sends nothing.
            made = PipelineStage(
                self._stage, self._number, self._stages, torch.device("cpu"),
                input_args=takes, output_args=hidden, group=self._group,
            )  # fmt: skip
            ready = kind(made, self._microbatches, loss_fn=self._loss, scale_grads=False)
            while len(self._ready) >= _MOST_KEPT:
                self._ready.pop(next(iter(self._ready)))
        self._ready[key] = ready
        return ready

    def _loss(self, leaves: tuple[Tensor, ...], numbers: Tensor) -> Tensor:
        """What one microbatch adds to the loss; the stage has left out the rows that filled it up."""
        begin, end = int(numbers[0]), min(int(numbers[-1]) + 1, self._rows)
        if begin >= end or self._examine is None:
            return leaves[0].sum() * 0.0
        spec = self._stage.outputs
        outputs = tree_unflatten(list(leaves), spec) if spec is not None else leaves
        return self._examine(outputs, slice(begin, end))


def _arguments(x: Any) -> tuple[Tensor, dict[str, Any]]:
    if not isinstance(x, Mapping) or not isinstance(x.get(_WORDS), Tensor):
        kind = f"a dict with {sorted(map(str, x))}" if isinstance(x, Mapping) else f"a {type(x).__name__}"
        raise DataError(
            f'a pipeline got {kind} as the model\'s inputs; give a dict of its keyword arguments with "{_WORDS}"'
        )
    named = dict(x)
    return named.pop(_WORDS), named


def _filled(leaf: Any, rows: int, length: int) -> Any:
    """A tensor of ``rows`` rows with its first row repeated behind them."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows or rows == length:
        return leaf
    return torch.cat([leaf, leaf[:1].expand(length - rows, *leaf.shape[1:])])
