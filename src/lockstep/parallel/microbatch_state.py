"""Modules of a pipeline whose numbers depend on how a shard is divided into microbatches.

    a pass that trains: buffers before -> forward of each microbatch -> buffers after: what differs was kept of its rows

Batch norm takes the statistics of the rows that it is given, ``spectral_norm`` iterates once a call, a counter counts
calls; in a pipeline all of them see microbatches. They are found by what they do and not by their types.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep._torch_compat import BatchNormBase
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.parallel.pipeline_values import numbers_of


class StateWatch:
    """The buffers and numbers of the modules of a worker's part of a model, as they are at the start of a pass."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = dict(model.named_modules())
        self._before = {name: (_copies(part), numbers_of(part)) for name, part in self._parts.items()}

    def changed(self) -> list[str]:
        """The modules that have changed since, or take statistics of the rows that they are given."""
        names = [name for name, part in self._parts.items() if _normalizes_by_rows(part) or self._differs(name, part)]
        return [f"{name!r} ({type(self._parts[name]).__name__})" for name in names]

    def _differs(self, name: str, part: nn.Module) -> bool:
        buffers, numbers = self._before[name]
        # An attribute or buffer that has gone keeps nothing of a microbatch, so it counts as unchanged.
        now, numbers_now = part._buffers, numbers_of(part)
        return any(_is_changed(before, now.get(key)) for key, before in buffers.items()) or any(
            before != numbers_now.get(key, before) for key, before in numbers.items()
        )


def warn_of_changed(watch: StateWatch, workers: Communicator, microbatches: int) -> bool:
    """Warns on all workers of a pipeline of what any of them has found. All must call it.

    Returns whether there was something.
    """
    gathered: Sequence[list[str]] = all_gather_object(workers, "modules that keep something of rows", watch.changed())
    modules = [name for names in gathered for name in names]
    if modules:
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        warnings.warn(
            f"{', '.join(modules[:3])}{more} computes with statistics of the rows that it is given, or keeps something "
            f"at each call, and a pipeline gives it {microbatches} microbatches a step: the numbers depend on "
            "microbatches= and are not those of one device; use GroupNorm or LayerNorm, freeze it with eval(), choose "
            'schedule="gpipe" and microbatches=1, or divide the model by tensor= instead of pipeline=',
            stacklevel=2,
        )
    return bool(modules)


def _copies(part: nn.Module) -> dict[str, Tensor]:
    return {key: buffer.detach().clone() for key, buffer in part._buffers.items() if buffer is not None}


def _is_changed(before: Tensor, now: Tensor | None) -> bool:
    # One of another shape is a cache, such as of positions, and keeps nothing of the rows.
    return now is not None and now.shape == before.shape and not torch.equal(before, now.to(before.dtype))


def _normalizes_by_rows(part: nn.Module) -> bool:
    # Batch norm in training changes its running buffers. Without buffers nothing changes, so it is told by its type.
    return isinstance(part, BatchNormBase) and (part.training or part.running_mean is None)
