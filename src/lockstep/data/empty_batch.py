"""A batch of no rows as text: what a worker that never had a batch needs to take part in the others' step.

    PerReplica leaves -> replica 0's dtypes and shapes -> JSON -> another worker: 0 rows for each of its replicas

JSON, since what comes from another process must not run code here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.leaves import has_rows, is_plain
from lockstep.data.shards import emptied
from lockstep.data.structure import RowList, RowTuple, map_leaves
from lockstep.errors import DataError

_DICT, _LIST, _TUPLE, _ROWS, _TENSOR, _VALUE = "dict", "list", "tuple", "rows", "tensor", "value"
_ROW_KINDS: dict[str, type[Any]] = {"row list": RowList, "row tuple": RowTuple}
_VALUES = (bool, int, float, str, type(None))


def without_rows(batch: Any) -> Any:
    """A batch with PerReplica leaves, with 0 rows for every replica."""
    return map_leaves(lambda _, leaf: PerReplica([emptied(value) for value in leaf]), batch)


def packed(batch: Any) -> bytes:
    """Replica 0's part of a batch with PerReplica leaves, without its rows.

    Raises:
        DataError: the batch has a named tuple, a key or a value that JSON has not.
    """
    return json.dumps(_described(batch)).encode()


def unpacked(payload: bytes, replicas: int) -> Any:
    """The batch of 0 rows for each of ``replicas`` local replicas, in host memory."""
    return map_leaves(lambda _, leaf: PerReplica([leaf] * replicas), _built(json.loads(payload)))


def _described(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        if not all(isinstance(key, (str, int)) for key in node):
            raise _unsendable(f"keys such as {next(iter(node))!r}")
        return [_DICT, [[key, _described(child)] for key, child in node.items()]]
    if type(node) in (list, tuple):
        return [_LIST if type(node) is list else _TUPLE, [_described(child) for child in node]]
    return _described_leaf(node[0] if isinstance(node, PerReplica) else node)


def _described_leaf(leaf: Any) -> list[Any]:
    if type(leaf) in _ROW_KINDS.values():
        return [next(kind for kind, made in _ROW_KINDS.items() if type(leaf) is made)]
    if has_rows(leaf) and not is_plain(leaf):
        raise _unsendable(f"a {type(leaf).__name__} that is sparse, nested or packed")
    if has_rows(leaf):
        return [_ROWS, _name(leaf.dtype), [0, *leaf.shape[1:]]]
    if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
        return [_TENSOR, _name(leaf.dtype), leaf.item()]
    if isinstance(leaf, _VALUES):
        return [_VALUE, leaf]
    raise _unsendable(f"a {type(leaf).__name__}")


def _built(node: list[Any]) -> Any:
    kind, *content = node
    if kind == _DICT:
        return {key: _built(child) for key, child in content[0]}
    if kind in (_LIST, _TUPLE):
        children = [_built(child) for child in content[0]]
        return children if kind == _LIST else tuple(children)
    if kind == _VALUE:
        return content[0]
    if kind in _ROW_KINDS:
        return _ROW_KINDS[kind]()
    name, value = content
    dtype = getattr(torch, name)
    return torch.empty(value, dtype=dtype) if kind == _ROWS else torch.tensor(value, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unsendable(what: str) -> DataError:
    return DataError(
        f"a worker has no batch, and the structure of the others' cannot be sent to it: it has {what}; make batches of "
        "tuples, lists and dicts with tensors, numbers and strings, or give every worker data"
    )
