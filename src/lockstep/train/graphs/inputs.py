"""The inputs of a recorded step: what tells one kind of batch from another, and the tensors at fixed addresses.

A recorded step reads its batch from the same addresses every time. So each batch is copied there before the replay,
and a batch of other shapes, dtypes or plain values is another step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import is_plain
from lockstep.train.graphs.unfit import UnfitError


def signature(batch: Any) -> Hashable:
    """What two batches have in common if one recorded step serves both.

    Args:
        batch: nested tuples, lists and mappings of ``PerReplica`` and plain values.

    Raises:
        UnfitError: it holds something that cannot be compared.
    """
    if isinstance(batch, PackedSequence) or (isinstance(batch, torch.Tensor) and not is_plain(batch)):
        raise UnfitError("the batches hold sparse, nested or packed tensors, which have no fixed address")
    if isinstance(batch, torch.Tensor):
        return (batch.shape, batch.stride(), batch.dtype, batch.device)
    if isinstance(batch, Mapping):
        return (type(batch), tuple((key, signature(value)) for key, value in batch.items()))
    if isinstance(batch, (tuple, list, PerReplica)):
        return (type(batch), tuple(signature(value) for value in batch))
    try:
        hash(batch)
    except TypeError:
        raise UnfitError(
            f"the batches hold a {type(batch).__name__}, which cannot be compared with the next one; give tensors, "
            "numbers or text"
        ) from None
    return (type(batch), batch)


class StaticInputs:
    """A batch at fixed addresses, which other batches of the same signature are copied to.

    Args:
        batch: the first of them.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = tree_map(_fixed, batch)
        self._tensors = tensors(self.batch)

    def take(self, batch: Any) -> None:
        """Copies ``batch``, of the same signature, to the fixed addresses, on the current stream."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, tensors(batch), non_blocking=True)


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(batch):
        # A replica's value may be a list of rows.
        values = tree_leaves(list(leaf)) if isinstance(leaf, PerReplica) else [leaf]
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found


def _fixed(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return PerReplica([tree_map(_fixed, value) for value in leaf])
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
