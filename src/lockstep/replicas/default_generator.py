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
beside_own: ContextVar[tuple[torch.Generator, ...]] = ContextVar("lockstep_beside_own", default=())
"""Others that the replica draws from by itself: their states are taken, and put back, with that of its own."""


class _DefaultHere:
    """Stands under ``torch.random.default_generator``: every use goes to the generator that is the default here."""

    def __init__(self, process_wide: torch.Generator) -> None:
        self._process_wide = process_wide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here() or self._process_wide, name)

    def get_state(self) -> torch.Tensor:
        """That of the default generator here, and behind it those of what it stands with."""
        own, *beside = self._all()
        return torch.cat([own.get_state(), *(each.get_state() for each in beside)]) if beside else own.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """What ``get_state`` gave, or a state of the default generator alone."""
        own, *beside = self._all()
        size = own.get_state().numel()
        if not beside or state.numel() == size:
            own.set_state(state)
            return
        for generator, part in zip((own, *beside), state.split(size), strict=True):  # type: ignore[no-untyped-call]
            generator.set_state(part.clone())

    def _here(self) -> torch.Generator | None:
        here = own_generator.get()
        return here() if here is not None else None

    def _all(self) -> tuple[torch.Generator, ...]:
        own = self._here()
        return (self._process_wide,) if own is None else (own, *beside_own.get())


@functools.cache
def know_replicas() -> None:
    """Makes torch.get_rng_state, set_rng_state, fork_rng, manual_seed and initial_seed mean the replica's generator.

    Process-wide and once. Outside replicas nothing changes.
    """
    process_wide = torch.random.default_generator  # type: ignore[attr-defined]
    torch.random.default_generator = _DefaultHere(process_wide)  # type: ignore[assignment, attr-defined]
