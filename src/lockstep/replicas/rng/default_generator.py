"""Makes torch.get_rng_state and its like mean the replica's own generator inside a replica.

Gradient checkpointing saves the state of torch.random's default generator before a block and restores it to draw the
block's dropout masks once more. A replica's masks come from its own generator, so the gradients would be wrong.
torch.random finds its generator under one global name, which gets an object that answers for each thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

GeneratorHere = Callable[[], torch.Generator | None]

own_generator: ContextVar[GeneratorHere | None] = ContextVar("lockstep_own_generator", default=None)
"""Returns the generator that is the default in this context; None, or a result of None, is torch's."""
companion_generators: ContextVar[tuple[torch.Generator, ...]] = ContextVar("lockstep_beside_own", default=())
"""Other generators that the replica draws from: their states are saved, and restored, with that of its own."""


class _DefaultHere:
    """Replaces ``torch.random.default_generator``: every use goes to the generator that is the default here."""

    def __init__(self, process_wide: torch.Generator) -> None:
        self._process_wide = process_wide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current() or self._process_wide, name)

    def get_state(self) -> torch.Tensor:
        """The state of the default generator here, followed by those of its companions."""
        states = [generator.get_state() for generator in self._all()]
        return torch.cat(states) if len(states) > 1 else states[0]

    def set_state(self, state: torch.Tensor) -> None:
        """Restores what ``get_state`` returned, or a state of the default generator alone."""
        default, *companions = self._all()
        size = default.get_state().numel()
        if not companions or state.numel() == size:
            default.set_state(state)
            return
        for generator, part in zip((default, *companions), state.split(size), strict=True):  # type: ignore[no-untyped-call]
            generator.set_state(part.clone())

    def _current(self) -> torch.Generator | None:
        get_generator = own_generator.get()
        return get_generator() if get_generator is not None else None

    def _all(self) -> tuple[torch.Generator, ...]:
        generator = self._current()
        return (self._process_wide,) if generator is None else (generator, *companion_generators.get())


@functools.cache
def patch_default_generator() -> None:
    """Makes torch.get_rng_state and its like mean the replica's generator inside replicas. Process-wide and once."""
    # By this name, since torch.utils.checkpoint takes no generator: it saves and restores the state by torch.random
    # (test_checkpointed_dropout_has_the_gradients_of_plain_dropout).
    process_wide = torch.random.default_generator  # type: ignore[attr-defined]
    torch.random.default_generator = _DefaultHere(process_wide)  # type: ignore[assignment, attr-defined]
