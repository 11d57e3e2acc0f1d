"""Inside a replica, "the default generator" is the replica's own: for torch.get_rng_state and its like.

Gradient checkpointing notes the generator's state before a block and puts it back to draw the block's dropout masks
once more in the backward pass. It asks torch.random for the process's default generator; but in a replica's thread the
masks come from another one, so the second masks would differ from the first and the gradients would be wrong without
a sign. torch.random finds the generator under one global name, and that name is given an answer for each thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

GeneratorHere = Callable[[], torch.Generator | None]

own_generator: ContextVar[GeneratorHere | None] = ContextVar("lockstep_own_generator", default=None)
"""Asked for the generator that stands for the default one in this context; None, or an answer of None, is torch's."""


class _DefaultHere:
    """Stands under ``torch.random.default_generator``: every use goes to the generator that is the default here."""

    def __init__(self, process_wide: torch.Generator) -> None:
        self._process_wide = process_wide

    def __getattr__(self, name: str) -> Any:
        here = own_generator.get()
        generator = here() if here is not None else None
        return getattr(self._process_wide if generator is None else generator, name)


@functools.cache
def know_replicas() -> None:
    """Makes torch.get_rng_state, set_rng_state, fork_rng, manual_seed and initial_seed mean the replica's generator.

    Process-wide and once. Outside replicas nothing changes.
    """
    process_wide = torch.random.default_generator  # type: ignore[attr-defined]
    torch.random.default_generator = _DefaultHere(process_wide)  # type: ignore[assignment, attr-defined]
