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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
    """

    def __init__(self, count: int, total: int) -> None:
        self._count = count
        self._total = total
        self._items: CountedItems | None = None

    def watch(self, items: Tensor | int | None, device: torch.device) -> Tensor | None:
        """The number of items that a loss may be divided by, on ``device``, watched for whether it is."""
        self._items = None if items is None else CountedItems.of(torch.as_tensor(items, device=device))
        return self._items

    @property
    def factor(self) -> float:
        """What the loss of a shard is multiplied by, where the number of items is that of the whole batch."""
        return 1.0 if self._divides else self._count / self._total

    @property
    def weight(self) -> float:
        """What the loss of a shard was divided by, where the number of items is that of the shard."""
        return float(self._items) if self._items is not None and self._divides else self._count

    @property
    def _divides(self) -> bool:
        return self._items is not None and self._items.used


_share: ContextVar[Share | None] = ContextVar("lockstep_share", default=None)


@contextmanager
def weighing(share: Share) -> Iterator[Share]:
    """Inside, ``share`` is that of the shard whose loss this thread computes."""
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def current_share() -> Share | None:
    """The share of the shard whose loss is being computed; None outside ``weighing``."""
    return _share.get()


def weighted(loss: Tensor) -> Tensor:
    """The loss, weighed by the share of the shard whose step this is; outside such a step, as it is."""
    share = _share.get()
    return loss if share is None or share.factor == 1.0 else loss * share.factor


def shifts_labels(model: Any) -> bool:
    """Whether a mean loss of the model compares position i with label i + 1, so that a row's first label has no loss.

    An encoder-decoder's labels stand where they are compared, whatever its loss is called.
    """
    base = getattr(model, "get_base_model", lambda: model)()  # what adapters of peft are around
    causal = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss
    causal = causal or type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return causal and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


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
