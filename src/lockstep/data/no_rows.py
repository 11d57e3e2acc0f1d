"""What an error says that a step raised in a replica whose shard of the batch is empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.data.leaves import rows_of, view_leaves

_NOTE = (
    "this replica's shard has 0 rows, since the batch has fewer rows than the {replicas} replicas; where the step "
    "cannot take 0 rows, make every batch of at least {replicas} rows (drop_last=True, or another batch_size), or "
    "run forward and backward only where there are rows; optimizer.step() and other collectives belong in every replica"
)


def told_of_no_rows(body: Callable[[], Any], view: Any, replicas: int) -> Callable[[], Any]:
    """``body``, whose errors get a note where a tensor among its arguments has no rows.

    Args:
        body: one replica's part of a run.
        view: its arguments.
        replicas: how many there are, of all workers.
    """
    return partial(_run, body, view, replicas)


def _run(body: Callable[[], Any], view: Any, replicas: int) -> Any:
    try:
        return body()
    except Exception as error:
        if replicas > 1 and any(rows_of(leaf) == 0 for leaf in view_leaves(view)):
            error.add_note(_NOTE.format(replicas=replicas))
        raise
