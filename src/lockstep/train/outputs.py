"""The outputs of predict: shards put together again, in the order of the data, on the CPU.

Pure functions on one value per replica; the structure of the module's outputs is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.collectives.communicator import Workers, exchange_values
from lockstep.errors import ConfigError


class CollectedOutputs:
    """Rows of outputs, added shard by shard in the order of the data, and joined once at the end."""

    def __init__(self) -> None:
        self._spec: Any = None
        self._columns: list[list[Tensor]] = []
        self._rows: list[int] = []

    def begin_batch(self) -> None:
        """Shards that are added from now on are of another global batch."""
        self._rows.append(0)

    def add(self, rows: int, outputs: Any) -> None:
        """Adds one shard's outputs.

        Args:
            rows: the rows of the shard; each output tensor must have as many along dim 0.
            outputs: a tensor or a structure of tensors, of the same structure each time.

        Raises:
            ConfigError: a leaf that is no tensor with ``rows`` rows, or a structure unlike the first one.
        """
        leaves, spec = tree_flatten(outputs)
        _check_rows(leaves, rows)
        self._rows[-1] += rows
        if self._spec is None:
            self._spec, self._columns = spec, [[] for _ in leaves]
        elif spec != self._spec:
            raise ConfigError(
                f"the module returned {spec} after {self._spec}; predict needs one structure for all batches"
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.append(leaf.detach().cpu())

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return self._spec is None

    def joined(self, workers: Workers) -> Any:
        """All rows of all workers: the structure of the outputs with one tensor per leaf, on the CPU.

        Every worker must call it.

        Raises:
            ConfigError: no worker has a row; or this one has none, and the structure is none of plain containers.
        """
        columns = [torch.cat(column) for column in self._columns]
        if workers.alone:
            return tree_unflatten(columns, self._spec)
        columns, spec = self._like_others(workers, columns)
        rows = exchange_values(workers, "rows of the predictions", self._rows)
        gathered = [workers.gather_tensors("predictions", column, 0) for column in columns]
        return tree_unflatten([_interleaved(parts, rows) for parts in gathered], spec)

    def _like_others(self, workers: Workers, columns: list[Tensor]) -> tuple[list[Tensor], Any]:
        """This worker's columns; where it never had a row, empty ones such as another worker has."""
        empty = None if self._spec is None else _plain(tree_unflatten([column[:0] for column in columns], self._spec))
        known = [each for each in exchange_values(workers, "structure of the predictions", empty) if each is not None]
        if self._spec is not None:
            return columns, self._spec
        if not known:
            raise ConfigError("predict got no rows on any worker; give data with at least one row")
        return tree_flatten(known[0])


def _plain(structure: Any) -> Any:
    """The same tensors in dicts and tuples, as they can be sent: a worker without rows knows no class of the user's."""
    if isinstance(structure, Mapping):
        return {key: _plain(value) for key, value in structure.items()}
    if isinstance(structure, (tuple, list)):
        parts = [_plain(each) for each in structure]
        return parts if isinstance(structure, list) else tuple(parts)
    return structure


def _interleaved(parts: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """The workers' rows in the order of the data: batch by batch, and in each batch worker by worker."""
    batches = zip(*(torch.split(part, list(counts)) for part, counts in zip(parts, rows, strict=True)), strict=True)
    return torch.cat([shard for batch in batches for shard in batch])


def _check_rows(leaves: Sequence[Any], rows: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"the module returned a {type(leaf).__name__} among its outputs; predict joins rows of tensors: "
                "return tensors only"
            )
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise ConfigError(
                f"the module returned shape {tuple(leaf.shape)} for {rows} rows; predict needs one row per example: "
                f"return tensors whose first dimension is {rows}"
            )
