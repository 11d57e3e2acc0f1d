"""The outputs of predict: shards put together again, in the order of the data, on the CPU.

Pure functions on one value per replica; the structure of the module's outputs is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.errors import ConfigError


class CollectedOutputs:
    """Rows of outputs, added shard by shard in the order of the data, and joined once at the end."""

    def __init__(self) -> None:
        self._spec: Any = None
        self._columns: list[list[Tensor]] = []

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

    def joined(self) -> Any:
        """All rows: the structure of the outputs with one tensor per leaf, on the CPU."""
        return tree_unflatten([torch.cat(column) for column in self._columns], self._spec)


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
