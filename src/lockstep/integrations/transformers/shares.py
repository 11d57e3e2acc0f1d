"""A shard's share of the loss of its global batch.

    loss of the batch = sum over replicas of share x loss of the shard          (and so for the gradients)

A loss that the model normalises itself, by ``num_items_in_batch``, is a part of a sum already: its share is 1. A mean,
of rows or of tokens, has the share of what was counted: rows or tokens of the shard over those of the batch. Which of
the two it is shows when the loss is computed: was the number of items used?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

IGNORED = -100
"""The label of what has no loss, in transformers as in torch's cross-entropy."""


class CountedItems(Tensor):
    """The number of items of a batch, a tensor without a dimension, which notices when something computes with it."""

    used = False

    @classmethod
    def of(cls, number: Tensor) -> CountedItems:
        """A number that has not been used yet."""
        return number.detach().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as with a plain tensor. To ask for an attribute, such as the device, is no use yet."""
        if getattr(func, "__name__", "") != "__get__":
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, cls):
                    value.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Share:
    """A shard's share, known when its loss has been computed.

    Args:
        count: rows or tokens of the shard that a mean is over.
        total: those of the global batch.
        items: the number of items that the whole loss is divided by, as the model is given it; None if it is not.
    """

    def __init__(self, count: int, total: int, items: Tensor | None = None) -> None:
        self._mean = count / total if total else 0.0
        self.items = None if items is None else CountedItems.of(items)

    @property
    def factor(self) -> float:
        """What the shard's loss is multiplied by."""
        return 1.0 if self.items is not None and self.items.used else self._mean


_share: ContextVar[Share | None] = ContextVar("lockstep_share", default=None)


@contextmanager
def weighing(share: Share) -> Iterator[Share]:
    """Inside, ``weighted`` weighs a loss of this thread by ``share``."""
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def weighted(loss: Tensor) -> Tensor:
    """The loss, weighed by the share of the shard whose step this is; outside such a step, as it is."""
    share = _share.get()
    return loss if share is None or share.factor == 1.0 else loss * share.factor


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss compares position i with label i + 1, so that a row's first label has no loss.

    An encoder-decoder's labels stand where they are compared, whatever its loss is called.
    """
    causal = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return causal and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def count_items(inputs: Mapping[str, Any], rows: int, *, shifted: bool) -> int:
    """How many values the mean loss of ``inputs`` is over: labels that count, or rows where these are no class numbers.

    Args:
        inputs: a batch or shard, as the model gets it.
        rows: how many examples it has.
        shifted: what ``shifts_labels`` says of the model.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and shifted and labels.ndim > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return rows
    return int(labels.ne(IGNORED).sum())
