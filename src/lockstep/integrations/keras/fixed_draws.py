"""Fixed numbers in place of random ones, where the results of shards are compared with those of their batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.integrations.keras.losses import is_compared
from lockstep.replicas.rng.function_mode import is_noise, is_random


@contextmanager
def compared() -> Iterator[None]:
    """A block in which the results for a row do not depend on the rows beside it, nor on what is drawn."""
    token = is_compared.set(True)
    try:
        with _FixedDraws():
            yield
    finally:
        is_compared.reset(token)


class _FixedDraws(TorchFunctionMode):
    """Inside, random numbers are 0.5, or 0 for integers, dropout leaves all elements, and rows are not shuffled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func) and "dropout" in func.__name__ and args:
            return args[0]
        kwargs = kwargs or {}
        if func in (torch.argsort, Tensor.argsort):  # by which Keras shuffles
            return _in_order(*args, **kwargs)
        drawn = func(*args, **kwargs)
        # Noise alone: scaled_dot_product_attention counts as random for its dropout, and its result is none.
        if not is_noise(func) or not isinstance(drawn, Tensor) or drawn.requires_grad:
            return drawn
        return torch.arange(drawn.numel(), device=drawn.device) if func is torch.randperm else drawn.fill_(0.5)


def _in_order(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """``argsort``, which leaves equal numbers in their order."""
    # What Keras sorts by to shuffle is 0.5 everywhere here, so only a stable order leaves the rows where they are.
    return torch.sort(input, dim=dim, descending=descending, stable=True).indices
