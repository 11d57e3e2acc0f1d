"""Gradients that a replica was given as sums over all replicas, which nobody is to add up once more.

The mark is an attribute of the tensor: it goes where the tensor goes, out of the step too, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.errors import UsageError

_MARK = "_lockstep_summed"


def mark_summed(gradient: torch.Tensor) -> None:
    """Notes that ``gradient`` is the sum over all replicas."""
    setattr(gradient, _MARK, True)


def refuse_summed(what: str, values: Iterable[Any]) -> None:
    """Called before values are added up over the replicas.

    Args:
        what: is about to add them up.
        values: any objects.

    Raises:
        UsageError: one of them is a gradient that was added up before.
    """
    for value in values:
        if isinstance(value, torch.Tensor) and getattr(value, _MARK, False):
            raise UsageError(
                f"{what} was given a parameter's .grad of shape {tuple(value.shape)}, which would be counted once for "
                "each replica: what a step reads as .grad is the sum over all replicas already; use it as it is. Each "
                "replica's own gradients are what torch.autograd.grad(loss, parameters) returns"
            )
