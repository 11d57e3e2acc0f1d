"""A replica whose shard of the batch is empty: how a step finds that out, and what an error says that it raised there.

9 rows, 4 replicas -> 3, 2, 2, 2      2 rows, 4 replicas -> 1, 1, 0, 0: the last two have no rows
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.data.leaves import rows_of, view_leaves
from lockstep.errors import DataError

_NOTE = (
    "this replica's shard has 0 rows, since the batch has fewer rows than the {replicas} replicas; where the step "
    "cannot take 0 rows, make every batch of at least {replicas} rows (drop_last=True, or another batch_size), or "
    "run forward and backward only where there are rows (if ls.has_rows(batch): ...); optimizer.step() and other "
    "collectives belong in every replica"
)


def has_rows(batch: Any) -> bool:
    """Whether a replica's shard has rows: none of a batch that has fewer rows than there are replicas.

    A step whose module cannot take 0 rows runs its forward and backward pass only where there are some. A replica that
    leaves them out adds zeros; ``optimizer.step()`` and other collectives belong in every replica, and
    ``compute_average_loss`` without ``global_batch_size`` is one.

    Args:
        batch: what the step got: a tensor, or tensors, arrays and lists of rows in tuples, lists and dicts.

    Raises:
        DataError: nothing in it has rows.

    Example:
        >>> import torch, lockstep as ls
        >>> ls.has_rows((torch.zeros(0, 3), torch.zeros(0)))
        False
    """
    rows = [number for leaf in view_leaves(batch) if (number := rows_of(leaf)) is not None]
    if not rows:
        raise DataError(
            f"has_rows got a {type(batch).__name__} in which nothing has rows; give the batch as the step gets it, or "
            "a tensor of it"
        )
    return any(rows)


def told_of_no_rows(body: Callable[[], Any], view: Any, replicas: int) -> Callable[[], Any]:
    """``body``, whose errors get a note where a tensor among its arguments has no rows.

    Args:
        body: one replica's part of a run.
        view: its arguments.
        replicas: how many there are, of all workers.
    """
    return body if replicas == 1 else partial(_run, body, view, replicas)


def _run(body: Callable[[], Any], view: Any, replicas: int) -> Any:
    try:
        return body()
    except Exception as error:
        if any(rows_of(leaf) == 0 for leaf in view_leaves(view)):
            error.add_note(_NOTE.format(replicas=replicas))
        raise
