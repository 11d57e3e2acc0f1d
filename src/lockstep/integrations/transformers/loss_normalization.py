"""Weighs the loss of each shard by its share in the batch, and checks that a loss may be weighed so.

    loss of the batch = sum over replicas of share x loss of the shard          (and so for the gradients)

A loss that the model divides by ``num_items_in_batch`` is a part of a sum already, so its share is 1. A mean, over rows
or tokens, has the share of the shard's rows or tokens in those of the batch. Which it is shows when the loss is
computed: was the number of items used? ``LossCheck`` finds losses that are neither, such as class weights, plain sums,
and losses that compare rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep._torch_compat import DisableTorchFunctionSubclass, tree_leaves
from lockstep.integrations.transformers.sharding import Items, Shard, halves
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.watcher import TorchCalled, Watcher
from lockstep.strategies.base import Strategy
from lockstep.train.batch import keeping_modes
from lockstep.watch.check_schedule import follows_modules
from lockstep.watch.loss_parts import FAILURES, relative_difference
from lockstep.watch.row_dependence import Mixing, RowWatch

_EXACT, _ROUGH = 1e-4, 5e-2
_LOW = (torch.float16, torch.bfloat16)


class CountedItems(Tensor):
    """The number of items of a batch, a 0-dim tensor that notices when something computes with it."""

    is_used = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as with a plain tensor. Reading an attribute, such as the device, does not count as use."""
        if getattr(func, "__name__", "") != "__get__":
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, cls):
                    value.is_used = True
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Share:
    """A shard's share of the loss, known once the loss has been computed: of ``count`` rows or tokens in ``total``."""

    def __init__(self, count: int, total: int) -> None:
        self._count = count
        self._total = total
        self._items: CountedItems | None = None

    def watch(self, items: Tensor | int | None, device: torch.device) -> Tensor | None:
        """The number of items on ``device``, as a tensor that notices whether the loss is divided by it."""
        watched = None if items is None else torch.as_tensor(items, device=device).detach()
        # Whether the model divides by it shows only in use: losses of transformers take the number and may ignore it.
        self._items = None if watched is None else watched.as_subclass(CountedItems)
        return self._items

    @property
    def uses_items(self) -> bool:
        """Whether the loss has been divided by the number of items."""
        return self._items is not None and self._items.is_used

    @property
    def factor(self) -> float:
        """The factor of the shard's loss, if the number of items is that of the whole batch."""
        if not self._count:
            return 0.0
        return 1.0 if self.uses_items else self._count / self._total

    @property
    def weight(self) -> float:
        """The divisor of the shard's loss, if the number of items is that of the shard."""
        return float(self._items) if self._items is not None and self._items.is_used else self._count


_share: ContextVar[Share | None] = ContextVar("lockstep_share", default=None)


@contextmanager
def weighing(share: Share) -> Iterator[Share]:
    """Sets the share of the shard whose loss this thread computes in the block."""
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def current_share() -> Share | None:
    """The share of the shard whose loss is being computed; None outside ``weighing``."""
    return _share.get()


def is_left_out() -> bool:
    """Whether the loss that this thread computes is that of no row or token: it may be 0 / 0."""
    share = _share.get()
    return share is not None and share.factor == 0.0


def weighted(loss: Tensor) -> Tensor:
    """The loss times its shard's factor; outside a step of a shard, the loss itself."""
    share = _share.get()
    return loss if share is None or share.factor == 1.0 else loss * share.factor


def shifts_labels(model: Any) -> bool:
    """Whether the model's mean loss compares position i with label i + 1, so that a row's first label has no loss.

    The labels of an encoder-decoder are not shifted, whatever its loss is called.
    """
    base = getattr(model, "get_base_model", lambda: model)()  # inside the adapters of peft
    causal = LOSS_MAPPING.get(getattr(base, "loss_type", None) or "") is ForCausalLMLoss
    causal = causal or type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return causal and not getattr(getattr(base, "config", None), "is_encoder_decoder", False)


class ShardRows(Watcher):
    """Follows the rows of each local replica's shard through one step."""

    def __init__(self, modes: Sequence[ReplicaRng], shards: Sequence[Shard]) -> None:
        self._leaves = [tree_leaves(shard.inputs) for shard in shards]
        self._watches = [
            RowWatch(mode, shard.rows, through_modules=True) if shard.rows > 1 else None
            for mode, shard in zip(modes, shards, strict=True)
        ]

    def in_replica(self, replica: int) -> AbstractContextManager[None]:
        watch = self._watches[replica]
        return nullcontext() if watch is None else watch.watching(self._leaves[replica])

    def torch_called(self, replica: int) -> TorchCalled | None:
        watch = self._watches[replica]
        return None if watch is None else watch.call

    @property
    def mixing(self) -> Mixing | None:
        """What was found of rows that are combined."""
        return next((mixing for watch in self._watches if watch is not None for mixing in watch.mixings), None)


class LossCheck:
    """Checks in some of the first steps of a training whether the loss may be computed in shards, and warns once.

    loss(6 rows) = share x loss(first 3) + share x loss(last 3)

    A share is that of the labels, unless those of rows fit: of a loss that averages each row before all of them.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._steps = 0
        self._warned = False
        self._items: Items | None = None

    def items(self, model: Any) -> Items:
        """What the loss averages as far as the steps so far have shown, else what the model's own does."""
        return self._items or ("shifted labels" if shifts_labels(model) else "labels")

    def candidates(self, model: Any) -> list[Items]:
        """Returns what the loss may average, beginning with the present assumption."""
        first = self.items(model)
        return [first, *(items for items in get_args(Items) if items != first)]

    def decide(self, differences: Mapping[Items, Sequence[tuple[float, float] | None]]) -> None:
        """Decides what the loss averages.

        ``differences`` has those of all replicas for each candidate of a step, up to the first candidate without any.
        """
        former, *_ = differences
        fitting = next((items for items, apart in differences.items() if not any(apart)), None)
        if fitting is None:
            self._warn(differences[former])
        elif fitting != former:
            self._items = fitting
            if self._steps > 1:
                self._warn_of_late_items(former, fitting)

    def is_due(self) -> bool:
        """Whether the loss is checked in this step, on all workers: the 1st, 2nd, 4th, ...; one may have few labels."""
        self._steps += 1
        return self._replicas > 1 and self._steps.bit_count() == 1

    def rows_of_step(self, strategy: Strategy, shards: Sequence[Shard]) -> ShardRows | None:
        """What follows the rows of the local replicas' shards in this step: in the first two, and late ones."""
        follows = self._replicas > 1 and follows_modules(self._steps)
        return ShardRows(strategy.function_modes, shards) if follows else None

    def warn_of_mixed_rows(self, rows: ShardRows) -> None:
        """Warns once, if a replica has found that its loss is no sum over rows."""
        mixing = rows.mixing
        if mixing is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the model or its loss compares or combines the rows of a replica's shard ({mixing}), so "
            f"{self._replicas} replicas train with other numbers than one device; rows are dimension 0 of the inputs: "
            "give layers batch_first=True, gather what is compared with ls.gather_rows(value) in compute_loss, or use "
            "one replica",
            stacklevel=3,
        )

    def _warn_of_late_items(self, former: Items, fitting: Items) -> None:
        warnings.warn(
            f"step {self._steps} shows that the loss is a mean over {fitting}, and until now the losses of replicas "
            f"were weighed by their {former}; those steps trained with other numbers than one device where replicas "
            f"had different numbers of {former} in a row; have compute_loss_func return the sum of the losses over "
            "num_items_in_batch, or make the first batch one with two rows or more for each replica",
            stacklevel=4,
        )

    def _warn(self, differences: Sequence[tuple[float, float] | None]) -> None:
        """Warns once, if a replica has found a difference."""
        apart = next((difference for difference in differences if difference is not None), None)
        if apart is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the loss is {apart[0]:.6g} for the rows of a replica and {apart[1]:.6g} for the same rows in two parts, "
            "so it is neither a mean over rows or labels nor a sum over num_items_in_batch, and "
            f"{self._replicas} replicas train with other numbers than one device; have compute_loss_func return the "
            "sum of the rows' losses over num_items_in_batch, or use one replica",
            stacklevel=4,
        )


def loss_difference(
    loss_of: Callable[[Mapping[str, Any], Share], Tensor], shard: Shard, model: nn.Module, *, items: Items
) -> tuple[float, float] | None:
    """A shard's loss and the loss of its halves, if they differ; else None. The model is in evaluation mode meanwhile.

    ``loss_of`` computes the loss of some inputs; their Share learns whether the number of items was used.
    """
    if shard.rows < 2 or (shard.division is not None and shard.division.order is None):
        return None
    try:
        pair = halves(shard, items=items)
        with torch.no_grad(), keeping_modes(model):
            model.eval()
            whole = whole_loss(loss_of, shard)
            shares = [(half, Share(half.count, half.total)) for half in pair if half.count]
            parts = [float(loss_of(half.inputs, share)) * share.factor for half, share in shares]
    except FAILURES:  # the step itself will raise it
        return None
    rough = any(parameter.dtype in _LOW for parameter in model.parameters()) or torch.is_autocast_enabled("cpu")
    difference = relative_difference([whole], [[part] for part in parts] or [[0.0]])
    return (whole, sum(parts)) if (_ROUGH if rough else _EXACT) < difference < math.inf else None


def whole_loss(loss_of: Callable[[Mapping[str, Any], Share], Tensor], shard: Shard) -> float:
    """The loss of a shard in one part."""
    return float(loss_of(copy(shard.inputs), Share(shard.count, shard.count)))
