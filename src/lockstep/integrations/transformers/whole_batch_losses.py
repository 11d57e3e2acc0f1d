"""Losses of sentence-transformers that compare the rows of a batch: every replica computes that of the whole batch.

    embeddings of the shard  --gathered-->  embeddings of the batch  ->  the loss of one device  x the shard's share

The shares of all replicas add up to 1, so that the loss and its gradients count once. The loss is computed once in each
replica, and the model only for the replica's rows. Terms beside it that are means over rows are weighed by the same
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.errors import ConfigError, UsageError
from lockstep.integrations.transformers.loss_normalization import current_share
from lockstep.integrations.transformers.replica_view import ReplicaAccelerator
from lockstep.strategies.gather_rows import gather_rows

_METHOD, _FLAG = "compute_loss_from_embeddings", "gather_across_devices"
_MEANS_OVER_ROWS = frozenset(
    [
        *("CosineSimilarityLoss", "ContrastiveLoss", "TripletLoss"),
        *("MarginMSELoss", "DistillKLDivLoss", "EmbedDistillLoss"),
    ]
)
"""Classes of sentence-transformers 6.2 whose loss of embeddings is a mean over rows, so that a shard's is enough."""
_IF_SHORT = "with gradient_checkpointing=True if memory is short"
_REFUSED = {
    "CachedMultipleNegativesRankingLoss": f"MultipleNegativesRankingLoss, {_IF_SHORT}",
    "CachedSpladeLoss": f"SpladeLoss, {_IF_SHORT}",
    "GISTEmbedLoss": "MultipleNegativesRankingLoss",
    "CachedGISTEmbedLoss": "MultipleNegativesRankingLoss",
    "MegaBatchMarginLoss": "BatchHardTripletLoss or MultipleNegativesRankingLoss",
    "ContrastiveTensionLossInBatchNegatives": "MultipleNegativesRankingLoss",
    "MultipleNegativesRankingLoss": "BinaryCrossEntropyLoss",  # of a CrossEncoder: it draws the negatives
    "MultiVectorMultipleNegativesRankingLoss": "MultiVectorMarginMSELoss",
    "CachedMultiVectorMultipleNegativesRankingLoss": "MultiVectorMarginMSELoss",
}
"""Losses that compare rows in their forward pass, where they cannot be gathered, and what to use in their place."""
_DRAWS = ("n_layers_per_step", "n_dims_per_step")


def check_losses(modules: Iterable[nn.Module]) -> None:
    """Raises a ConfigError if one of some modules, or a part of one, is a loss that replicas cannot compute."""
    for part in (part for module in modules for part in module.modules()):
        names = [kind.__name__ for kind in type(part).__mro__]
        name = next((name for name in names if name in _REFUSED), None)
        if name is not None and not hasattr(part, _METHOD):
            raise ConfigError(
                f"the Trainer of lockstep got the loss {names[0]}, which compares the rows of a batch, and a replica "
                f"has some of them: its numbers would be those of smaller batches; choose {_REFUSED[name]}, or use "
                "one replica"
            )
        drawn = next((name for name in _DRAWS if _draws(part, name)), None)
        if drawn is not None:
            raise ConfigError(
                f"the Trainer of lockstep got {names[0]}({drawn}={getattr(part, drawn)}), which draws layers or "
                f"dimensions, and replicas would draw other ones; set {drawn}=-1, which takes all of them, or use one "
                "replica"
            )


def _draws(part: Any, name: str) -> bool:
    number = getattr(part, name, -1)
    return 0 < number < (len(part.matryoshka_dims) if name == "n_dims_per_step" else float("inf"))


def losses_of_whole_batch(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The parts of some modules that compute a loss from embeddings, but for those that are a mean over rows."""
    parts = {id(part): part for module in modules for part in module.modules()}
    return [part for part in parts.values() if hasattr(part, _METHOD) and not _is_mean_over_rows(part)]


def _is_mean_over_rows(loss: Any) -> bool:
    owner = next((kind for kind in type(loss).__mro__ if _METHOD in kind.__dict__), None)
    return owner is not None and owner.__name__ in _MEANS_OVER_ROWS and getattr(loss, "size_average", True)


@contextmanager
def gathering(losses: Sequence[Any], accelerator: ReplicaAccelerator) -> Iterator[None]:
    """A block in which these modules, one replica's, compute the loss of the whole batch. Every replica must enter it.

    In a check of the loss, which each replica makes alone, they return 0: what is left is to be a mean over rows.
    """
    rows, before = _Rows(accelerator), [dict(loss.__dict__) for loss in losses]
    for loss in losses:
        loss.__dict__[_METHOD] = partial(rows.loss, getattr(loss, _METHOD))
        if _FLAG in loss.__dict__:  # it would gather over the processes of torch.distributed too
            loss.__dict__[_FLAG] = False
    try:
        yield
    finally:
        for loss, attributes in zip(losses, before, strict=True):
            for name in (_METHOD, _FLAG):
                loss.__dict__.pop(name, None)
                if name in attributes:
                    loss.__dict__[name] = attributes[name]


class _Rows:
    """Gathers the rows of all replicas for the losses of one."""

    def __init__(self, accelerator: ReplicaAccelerator) -> None:
        self._accelerator = accelerator
        self._is_within = False

    def loss(self, compute: Any, *args: Any, **named: Any) -> Any:
        """``compute`` of the whole batch. A loss that it calls in turn has the whole batch already."""
        if self._is_within:
            return compute(*args, **named)
        self._is_within = True
        try:
            if self._accelerator.is_alone:
                return tree_map(torch.zeros_like, compute(*args, **named))
            self._check(args[0] if args else None)
            args, named = tree_map(_of_whole_batch, (args, named))
            return compute(*args, **named)
        finally:
            self._is_within = False

    def _check(self, embeddings: Any) -> None:
        share = current_share()
        if share is None or isinstance(embeddings, Tensor):  # of several columns, behind each other
            return
        lengths = {len(leaf) for leaf in tree_leaves(embeddings) if isinstance(leaf, Tensor) and leaf.ndim}
        rows = self._accelerator.rows
        if rows and lengths - {rows}:
            raise UsageError(
                f"a loss that compares rows got embeddings of {max(lengths)} rows in a replica whose shard has {rows}; "
                "give it those of the shard, as the Trainer gathers them"
            )


def _of_whole_batch(leaf: Any) -> Any:
    return gather_rows(leaf) if isinstance(leaf, Tensor) and leaf.ndim else leaf
