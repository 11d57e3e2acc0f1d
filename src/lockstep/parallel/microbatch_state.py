"""Modules of a pipeline whose numbers depend on how a shard is divided into microbatches.

    a pass that trains: buffers before -> forward of each microbatch -> buffers after: what differs was kept of its rows

Batch norm takes the statistics of the rows that it is given, ``spectral_norm`` iterates once a call, a counter counts
calls; in a pipeline all of them see microbatches. They are found by what they do and not by their types.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep._torch_compat import BatchNormBase
from lockstep.collectives.communicator import Communicator, all_gather_object


@dataclass
class BufferWatch:
    """The buffers of a worker's part of a model as they are at the start of a pass."""

    model: nn.Module
    _before: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, buffer in _buffers(self.model):
            self._before[name] = buffer.detach().clone()

    def changed(self) -> list[str]:
        """The modules that have changed a buffer since, or take statistics of the rows that they are given."""
        parts = dict(self.model.named_modules())
        names = [name for name, buffer in _buffers(self.model) if self._differs(name, buffer)]
        found = [name.rpartition(".")[0] for name in names]
        found += [name for name, part in parts.items() if _normalizes_by_rows(part)]
        return [f"{name!r} ({type(parts[name]).__name__})" for name in dict.fromkeys(found)]

    def _differs(self, name: str, buffer: Tensor) -> bool:
        before = self._before.get(name)
        # One of another shape is a cache, such as of positions, and keeps nothing of the rows.
        return before is not None and before.shape == buffer.shape and not torch.equal(before, buffer.to(before.dtype))


def warn_of_changed(watch: BufferWatch, workers: Communicator, microbatches: int) -> bool:
    """Warns on all workers of a pipeline of what any of them has found; whether there was something. All must call it."""
    everyones: Sequence[list[str]] = all_gather_object(workers, "modules that keep something of rows", watch.changed())
    found = [name for names in everyones for name in names]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        warnings.warn(
            f"{', '.join(found[:3])}{more} computes with statistics of the rows that it is given, or keeps something at "
            f"each call, and a pipeline gives it {microbatches} microbatches a step: the numbers depend on "
            "microbatches= and are not those of one device; use GroupNorm or LayerNorm, freeze it with eval(), choose "
            'schedule="gpipe" and microbatches=1, or divide the model by tensor= instead of pipeline=',
            stacklevel=2,
        )
    return bool(found)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer) for name, buffer in model.named_buffers() if not buffer.is_meta)


def _normalizes_by_rows(part: nn.Module) -> bool:
    return isinstance(part, BatchNormBase) and (part.training or part.running_mean is None)
