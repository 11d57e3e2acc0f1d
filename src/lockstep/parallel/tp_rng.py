"""Dropout among tensor ranks: alike where all hold the same values, each its own where each holds a part.

A replica's generator stands at the same number on all its tensor ranks, so whatever they compute alike they drop alike.
Modules that work on this rank's part of a layer draw from a generator of the rank's own instead, and on a GPU from the
replica's with another seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.replicas.rng.mode import ReplicaRng, in_replica
from lockstep.replicas.rng.state import companion_generators


class DeviceRng:
    """Switches a GPU's default generator between the seed of all ranks and that of this one. For one thread at a time.

    Args:
        default: returns the generator.
        own: a number that tells this rank from the others.
    """

    def __init__(self, default: Callable[[], torch.Generator], own: int) -> None:
        self._default = default
        self._own = own
        self._common: int | None = None
        """The seed of all ranks, while the generator has the rank's own."""

    @contextmanager
    def apart(self, on: bool) -> Iterator[None]:
        """Inside the block draws are the rank's own, or, where ``on`` is False, those of all ranks again."""
        generator = self._default()
        before, common = generator.initial_seed(), self._common
        if on and common is None:
            self._common = before
            _seed(generator, self._mixed(before))
        elif not on and common is not None:
            self._common = None
            _seed(generator, common)
        try:
            yield
        finally:
            self._common = common
            _seed(generator, before)

    def _mixed(self, common: int) -> int:
        digest = hashlib.sha256(f"{common}/{self._own}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)


def _seed(generator: torch.Generator, seed: int) -> None:
    """Another seed, at the same place."""
    if generator.initial_seed() != seed % 2**64:
        place = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(place)


class TensorParallelRng:
    """Has some of a model's modules draw random numbers of the tensor rank's own.

    Args:
        generator: the generator of this rank.
        on_gpu: the random numbers on this worker's GPU; None without a GPU.
    """

    def __init__(self, generator: torch.Generator, on_gpu: DeviceRng | None = None) -> None:
        self.generator = generator
        self._on_gpu = on_gpu
        self._on = self._given = False
        self._random = ReplicaRng(generator, applies=self._applies)

    def give(self, module: nn.Module, apart: Iterable[str], together: Iterable[str]) -> None:
        """Has the parts named in ``apart`` draw from it, but for those inside them that ``together`` names."""
        for name in apart:
            self._given = True
            _wrap(module.get_submodule(name), self._apart)
        for name in together:
            _wrap(module.get_submodule(name), self._together)

    @contextmanager
    def going_along(self) -> Iterator[None]:
        """Goes around what a replica does: what sets its generator back, as checkpointing does, sets this one too."""
        token = companion_generators.set((self.generator,) if self._given else ())
        try:
            yield
        finally:
            companion_generators.reset(token)

    def _applies(self) -> bool:
        return self._on and in_replica()

    def _apart(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._on = self._on, True
        try:
            with self._random, self._gpu_apart(True):
                return forward(*args, **kwargs)
        finally:
            self._on = before

    def _together(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._on = self._on, False
        try:
            with self._gpu_apart(False):
                return forward(*args, **kwargs)
        finally:
            self._on = before

    def _gpu_apart(self, on: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._on_gpu is None else self._on_gpu.apart(on)


def _wrap(part: nn.Module, within: Callable[..., Any]) -> None:
    forward = part.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return within(forward, *args, **kwargs)

    part.forward = wrapped
