"""The rows of the whole global batch in every replica, for losses that compare each row with others.

    replica 0: z [2, d]  --gather_rows-->  [5, d]     row_numbers: 0, 1
    replica 1: z [2, d]                    [5, d]                  2, 3
    replica 2: z [1, d]                    [5, d]                  4

Contrastive losses compare every row with all others, so a shard alone gives another loss: one with fewer negatives.
There are two ways to count the loss of a gathered batch once, and each gives the gradients of one device:

    anchors   each replica takes its part of the sum:  compute_average_loss(losses of its rows against all rows)
    whole     all replicas compute the whole loss:     scale_regularization_loss(loss(gather_rows(z)))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch

from lockstep._torch_compat import tree_map
from lockstep.checks import check_kind
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.strategies.base import in_cross_replica_context

T = TypeVar("T")


@dataclass
class Gathered:
    """What ``gather_rows`` has done in a ``gather_block``.

    Attributes:
        counts: whether the replica's rows do.
        any: whether rows have been gathered, so that every replica must run the backward pass.
    """

    counts: bool
    any: bool = False


_gathered: ContextVar[Gathered | None] = ContextVar("lockstep_gathered", default=None)


@contextmanager
def gather_block(*, counts: bool) -> Iterator[Gathered]:
    """A block of a replica's step in which ``gather_rows`` may be called.

    ``counts`` is False for a replica that has no rows, and computes some of another's so that it meets the others in
    collectives: ``gather_rows`` leaves these out.
    """
    gathered = Gathered(counts)
    token = _gathered.set(gathered)
    try:
        yield gathered
    finally:
        _gathered.reset(token)


def has_gathered_rows() -> bool:
    """Whether ``gather_rows`` has been called in the ``gather_block`` in which this is."""
    gathered = _gathered.get()
    return gathered is not None and gathered.any


def gather_rows(value: T) -> T:
    """The rows of all replicas and workers, in the order of the global batch. Every replica must call it.

    Differentiable: the gradient of a replica's rows is the sum of what all replicas have computed with them, so every
    replica must also run the backward pass. Shards of different lengths, and of 0 rows, are gathered as they are.
    Outside a scope it returns the value itself, which has all rows.

    Args:
        value: a tensor [rows, ...] of any dtype, or a tuple, list or dict of them. Replicas may differ in rows only.

    Returns:
        The same structure with tensors [rows of the global batch, ...], on the replica's device.

    Raises:
        ConfigError: a tensor without dimensions, or shapes that differ in more than the rows.
        UsageError: called in cross-replica context.
        CollectiveError: a replica does not call it, or leaves out the backward pass.

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy(["cpu:0"])
        >>> def step(z):
        ...     similarities = z @ ls.gather_rows(z).T
        ...     losses = torch.nn.functional.cross_entropy(similarities, ls.row_numbers(z), reduction="none")
        ...     return ls.compute_average_loss(losses)
        >>> round(float(strategy.run(step, (torch.eye(2),))), 4)
        0.3133
    """
    context = _context("gather_rows")
    if context is None:
        return value
    if (block := _gathered.get()) is not None:
        block.any = True
    if block is not None and not block.counts:
        value = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf, value)
    gathered: T = context.all_gather(value, axis=0)
    return gathered


def row_numbers(value: torch.Tensor) -> torch.Tensor:
    """The numbers in the global batch of this replica's rows, from 0. Every replica must call it.

    They are the rows of ``gather_rows(value)`` that are the replica's own, such as the targets of a contrastive loss.
    Outside a scope they are all rows.

    Args:
        value: a tensor [rows, ...], whose rows are counted.

    Returns:
        An int64 tensor [rows] on the device of ``value``.

    Raises:
        ConfigError: ``value`` has no rows.
        UsageError: called in cross-replica context.
    """
    context = _context("row_numbers")
    check_kind("value", value, torch.Tensor, "a tensor", optional=False)
    if not value.ndim:
        raise ConfigError("row_numbers got a tensor without dimensions, expected one of shape [rows, ...]")
    rows = len(value)
    block = _gathered.get()
    if context is not None and block is not None and not block.counts:
        _first_row(context, 0)
        return torch.zeros(rows, dtype=torch.int64, device=value.device)
    first = 0 if context is None else _first_row(context, rows)
    return torch.arange(first, first + rows, device=value.device)


def _first_row(context: ReplicaContext, rows: int) -> int:
    workers = context.workers

    def combine(local: list[int]) -> list[int]:
        of_workers = workers.all_gather_numbers("row_numbers", [sum(local)])
        first = int(sum(number for (number,) in of_workers[: workers.index]))
        return [first + sum(local[:replica]) for replica in range(len(local))]

    first: int = context.meet("row_numbers", rows, combine)[context.local_replica]
    return first


def _context(name: str) -> ReplicaContext | None:
    context = get_replica_context()
    if context is None and in_cross_replica_context():
        raise UsageError(f"{name} is about one replica's rows; call it inside the function given to strategy.run")
    return context
