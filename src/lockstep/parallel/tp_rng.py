"""Dropout among tensor ranks: alike where all hold the same values, each rank's own where each holds a part.

A replica's generator has the same state on all its tensor ranks. Modules that work on this rank's part of a layer draw
from a generator of the rank's own instead, and on a GPU from the replica's with another seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.replicas.rng.default_generator import companion_generators
from lockstep.replicas.rng.function_mode import ReplicaRng, in_replica


class DeviceRng:
    """Switches a GPU's default generator between the seed of all ranks and that of this one. Not thread-safe."""

    def __init__(self, default: Callable[[], torch.Generator], rank: int) -> None:
        self._default, self._rank = default, rank
        self._common: int | None = None  # the seed of all ranks, while the generator has the rank's own

    @contextmanager
    def switched(self, *, of_rank: bool) -> Iterator[None]:
        """A block that draws the rank's own numbers, or those of all ranks."""
        generator = self._default()
        before, common = generator.initial_seed(), self._common
        if of_rank and common is None:
            self._common = before
            # Seeds that differ by the rank alone, such as seed + rank, could be another replica's seed.
            digest = hashlib.sha256(f"{before}/{self._rank}".encode()).digest()
            _seed(generator, int.from_bytes(digest[:8], "little", signed=True))
        elif not of_rank and common is not None:
            self._common = None
            _seed(generator, common)
        try:
            yield
        finally:
            self._common = common
            _seed(generator, before)


def _seed(generator: torch.Generator, seed: int) -> None:
    """Sets another seed, at the same offset."""
    if generator.initial_seed() != seed % 2**64:
        # The offset goes on through both seeds, so no number is drawn twice, and setting the generator's state back
        # repeats both kinds of draws, as gradient checkpointing needs (tests/parallel/test_tp_rng.py).
        offset = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset)


class TensorParallelRng:
    """Has some of a model's modules draw the tensor rank's own numbers: of ``generator``, and ``on_gpu``."""

    def __init__(self, generator: torch.Generator, on_gpu: DeviceRng | None = None) -> None:
        self.generator = generator
        self._on_gpu = on_gpu
        self._is_of_rank = self._applied = False
        self._random = ReplicaRng(generator, applies=lambda: self._is_of_rank and in_replica())

    def apply_to(self, module: nn.Module, rank_modules: Iterable[str], common: Iterable[str]) -> None:
        """Has the ``rank_modules`` draw this rank's numbers, except the ``common`` modules inside them."""
        for name, of_rank in [*((name, True) for name in rank_modules), *((name, False) for name in common)]:
            self._applied = True
            self._wrap(module.get_submodule(name), of_rank=of_rank)

    @contextmanager
    def with_replica(self) -> Iterator[None]:
        """Goes around a replica's run: what restores its generator, as checkpointing does, restores this one too."""
        # Gradient checkpointing restores the replica's generator to compute a layer again. Without its companion a rank
        # would drop other units in the second forward (tests/strategies/test_parallel_recomputed.py).
        token = companion_generators.set((self.generator,) if self._applied else ())
        try:
            yield
        finally:
            companion_generators.reset(token)

    def _wrap(self, part: nn.Module, *, of_rank: bool) -> None:
        forward = part.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, self._is_of_rank = self._is_of_rank, of_rank
            on_gpu = nullcontext() if self._on_gpu is None else self._on_gpu.switched(of_rank=of_rank)
            try:
                with self._random if of_rank else nullcontext(), on_gpu:
                    return forward(*args, **kwargs)
            finally:
                self._is_of_rank = before

        # On the object and not as a wrapping module, which would change the names in the state_dict.
        part.forward = wrapped
