"""Checks in some of the first steps whether the loss may be computed in shards: a shard is compared with its halves.

    loss(6 rows) = share x loss(first 3) + share x loss(last 3)

It holds for a mean over rows or labels, and for a part of a sum over ``num_items_in_batch``. It does not for class
weights, plain sums, penalties beside such a sum, and losses that compare rows with each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.data.layout import BatchLayout
from lockstep.integrations.transformers.sharding import Shard, Share, divided

_EXACT, _ROUGH = 1e-4, 5e-2
_LAST_CHECK = 32
_LOW = (torch.float16, torch.bfloat16)
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError)

LossOf = Callable[[Mapping[str, Any], Share], Tensor]
"""Computes the loss of some inputs. Their Share learns whether the number of items was used."""


class LossCheck:
    """Decides in which steps of a training the loss is checked, and warns once.

    Args:
        replicas: the number of replicas, over all workers.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._steps = 0
        self._warned = False

    def is_due(self) -> bool:
        """Whether the loss is checked in this step: the first, 2nd, 4th, ..., as one step may have few labels.

        All workers check in the same steps, whatever they have found.
        """
        self._steps += 1
        return self._replicas > 1 and self._steps <= _LAST_CHECK and self._steps.bit_count() == 1

    def warn(self, found: Sequence[tuple[float, float] | None]) -> None:
        """Warns if a replica has found a difference, once."""
        apart = [each for each in found if each is not None]
        if not apart or self._warned:
            return
        self._warned = True
        whole, halves = apart[0]
        warnings.warn(
            f"the loss is {whole:.6g} for the rows of a replica and {halves:.6g} for the same rows in two parts, so it "
            "is neither a mean over rows or labels nor a sum over num_items_in_batch, and "
            f"{self._replicas} replicas train with other numbers than one device; have compute_loss_func return the "
            "sum of the rows' losses over num_items_in_batch. Class weights, plain sums, penalties beside such a sum "
            "and losses that compare rows need one replica, or a loop of your own with ls.get_replica_context()",
            stacklevel=3,
        )


def difference(loss_of: LossOf, shard: Shard, model: nn.Module, *, shifted: bool) -> tuple[float, float] | None:
    """A shard's loss and the loss of its halves, if they differ; else None.

    Args:
        loss_of: computes a loss.
        shard: of a batch.
        model: it is in evaluation mode meanwhile, so that dropout makes no difference.
        shifted: as for ``count_items``.
    """
    if shard.rows < 2:
        return None
    try:
        halves = list(
            divided(shard.inputs, SingleWorkerCommunicator(2), BatchLayout(records_are_rows=True), shifted=shifted)
        )
        with torch.no_grad(), _evaluating(model):
            whole = float(loss_of(dict(shard.inputs), Share(shard.count, shard.count)))
            parts = [_share_of(loss_of, half) for half in halves if half.count]
    except _FAILURES:  # the step itself will raise it
        return None
    rough = any(each.dtype in _LOW for each in model.parameters()) or torch.is_autocast_enabled("cpu")
    apart = abs(sum(parts) - whole) / max(sum(map(abs, parts)), abs(whole), 1e-12)
    return (whole, sum(parts)) if apart > (_ROUGH if rough else _EXACT) else None


def _share_of(loss_of: LossOf, half: Shard) -> float:
    share = Share(half.count, half.total)
    loss = float(loss_of(half.inputs, share))
    return loss * share.factor


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
