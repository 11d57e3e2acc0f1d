"""Gives one replica a single shard of every batch, as one of several replicas would get it; for an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._pytree import tree_leaves, tree_map

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.sharding import shard_sizes
from lockstep.data.structure import leaf_has_rows, rows_of, rows_taken
from lockstep.strategies.base import Strategy


@contextmanager
def one_shard(shard: int | None, number: int) -> Iterator[None]:
    """Cuts the batches that strategies of one replica run on, inside the block; process-wide.

    Args:
        shard: which, from 0; None cuts nothing.
        number: of shards.
    """
    if shard is None:
        yield
        return
    with patch.object(Strategy, "run", _cut_run(Strategy.run, shard, number)):
        yield


def _cut_run(original: Callable[..., Any], shard: int, number: int) -> Callable[..., Any]:
    def run(self: Strategy, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        rows = next((rows_of(leaf[0]) or 0 for leaf in tree_leaves((args, kwargs)) if _is_divided(leaf)), 0)
        sizes = shard_sizes(rows, number)
        start = sum(sizes[:shard])

        def cut(leaf: Any) -> Any:
            if not _is_divided(leaf) or rows_of(leaf[0]) != rows:
                return leaf
            return PerReplica([rows_taken(leaf[0], start, sizes[shard])])

        return original(self, fn, tree_map(cut, args), tree_map(cut, kwargs))

    return run


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica) and len(leaf) == 1 and leaf_has_rows(leaf[0])
