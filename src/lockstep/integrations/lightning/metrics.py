"""The torchmetrics of a module: each replica updates a copy, and after the step the module's own has all updates.

    replica 0   self.accuracy(shard 0) --.
    replica 1   self.accuracy(shard 1) ----> value of the batch, in all replicas
    outside     self.accuracy.compute() ---> value of all updates of all replicas

The module keeps its metric objects, so that hooks, ``self.log`` and checkpoints work with them as on one device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep._torch_compat import tree_map
from lockstep.errors import UsageError
from lockstep.mirroring.metric import (
    ONE_OBJECT,
    MirroredMetric,
    check_kind,
    is_metric,
    merge_into,
    merge_metrics,
    nested_metrics,
    states_of,
    ungroup,
)
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.strategies.base import Strategy

_AGGREGATORS = frozenset(["BaseAggregator", "RunningMean", "RunningSum"])  # of torchmetrics 1.9
_METHODS = ("update", "forward", "compute", "reset")
_mode: ContextVar[Literal["all", "alone", "compared"]] = ContextVar("lockstep_metrics", default="all")


@contextmanager
def metrics_alone(*, compared: bool = False) -> Iterator[None]:
    """A block in which a replica's metrics ask no other replica: it alone has rows.

    ``compared`` is for a step that is compared with itself: there values are NaN, since in a step they are of all
    replicas, and follow no rule.
    """
    token = _mode.set("compared" if compared else "alone")
    try:
        yield
    finally:
        _mode.reset(token)


class ReplicatedMetric:
    """A metric of the module, or a collection of some, with two copies for each local replica.

    One copy has the replica's updates since the last reset; the other those of one call, whose value is asked for.
    """

    def __init__(self, plain: Any, strategy: Strategy) -> None:
        check_kind(plain)
        self.plain, self._strategy = plain, strategy
        self._former: list[tuple[Any, dict[str, Any]]] = []
        self.copies, calls = self._copied(), self._copied()
        # The updates before this training stay in the plain metric, which counts beside the copies.
        parts = zip(plain.modules(), *(duplicate.modules() for duplicate in (*self.copies, *calls)), strict=True)
        for part, *copies in parts:
            if is_metric(part):
                self._take_over(part, copies[: len(self.copies)], copies[len(self.copies) :])

    def _copied(self) -> list[Any]:
        copies = [copy.deepcopy(self.plain).to(device.torch_device) for device in self._strategy.devices]
        for duplicate in copies:
            ungroup(duplicate)
            duplicate.reset()
        return copies

    def _take_over(self, part: Any, copies: Sequence[Any], calls: Sequence[Any]) -> None:
        """Has a metric answer for its copies: in a replica for the replica's, outside for all."""
        self._former.append((part, {name: vars(part)[name] for name in _METHODS if name in vars(part)}))
        answers = _Answers(self._strategy, part, copies, calls, {name: getattr(part, name) for name in _METHODS})
        part.__dict__.update({name: getattr(answers, name) for name in _METHODS})
        part.__dict__[ONE_OBJECT] = True
        part.__dict__["__deepcopy__"] = partial(_itself, part)  # one object in all copies of the module

    def give_back(self) -> None:
        """Gives the metric the updates of all replicas, and its own methods. Every worker must call it."""
        merged = _merged(self._strategy, self.plain, self.copies)
        for part, former in self._former:
            for name in (*_METHODS, ONE_OBJECT, "__deepcopy__"):
                part.__dict__.pop(name, None)
            part.__dict__.update(former)
        for part, source in zip(nested_metrics(self.plain), states_of(merged), strict=True):
            if source["updates"]:
                merge_into(part, [source])


@dataclass(frozen=True)
class _Answers:
    """The methods of one metric, for its copies.

    Attributes:
        strategy: that of the copies.
        part: the metric.
        copies: those with the updates of each replica.
        calls: those for single calls.
        plain: the metric's own methods by name.
    """

    strategy: Strategy
    part: Any
    copies: Sequence[Any]
    calls: Sequence[Any]
    plain: Mapping[str, Any]

    def update(self, *args: Any, **kwargs: Any) -> None:
        context = get_replica_context()
        if context is None:
            self.plain["update"](*args, **kwargs)
            return
        self._refuse_number_of_shard(context, args, kwargs)
        if _mode.get() == "compared":
            self._update_for_call(context, args, kwargs)
        else:
            self.copies[context.local_replica].update(*args, **kwargs)

    def _refuse_number_of_shard(self, context: ReplicaContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses a single number in MeanMetric and its like, which would count each replica's as that of a batch."""
        if context.num_replicas_in_sync == 1 or _mode.get() == "alone" or len(args) + len(kwargs) != 1:
            return  # with a weight there are two
        if not any(kind.__name__ in _AGGREGATORS for kind in type(self.part).__mro__):
            return
        (value,) = (*args, *kwargs.values())
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.ndim):
            raise UsageError(
                f"{type(self.part).__name__} got one number in a step, which is that of one replica's rows, and there "
                f"are {context.num_replicas_in_sync}; give it the numbers of the rows (a loss with reduction='none'), "
                "MeanMetric also weight=len(x), or log the number itself, self.log('loss', loss), which is then that "
                "of the whole batch"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Updates, and returns the value of the rows of all replicas in this call."""
        context = get_replica_context()
        if context is None:
            return self.plain["forward"](*args, **kwargs)
        self._refuse_number_of_shard(context, args, kwargs)
        call = self._update_for_call(context, args, kwargs)
        mode = _mode.get()
        if mode == "compared":
            return tree_map(lambda leaf: torch.full_like(leaf, math.nan, dtype=torch.float32), call.compute())
        self.copies[context.local_replica].update(*args, **kwargs)
        if mode == "alone":
            return self._note_value(call)
        value = context.meet(
            f"value of {type(self.part).__name__}",
            None,
            lambda _: self._note_value(MirroredMetric(self.strategy, self.calls)._merged()),
        )
        return _on_device(value, context)

    def compute(self) -> Any:
        """The value of all updates since the last reset."""
        context = get_replica_context()
        if context is None:
            return self._merged().compute()
        if _mode.get() == "compared":
            return torch.tensor(math.nan, device=context.device.torch_device)
        if _mode.get() == "alone":
            raise UsageError(
                f"the step computes {type(self.part).__name__} over all updates, for which all replicas meet, and this "
                "batch has fewer rows than there are replicas; compute it in a hook at the end of the epoch"
            )
        name = f"compute of {type(self.part).__name__}"
        return _on_device(context.meet(name, None, lambda _: self._merged().compute()), context)

    def reset(self) -> None:
        """Forgets all updates. Outside replicas only."""
        if get_replica_context() is not None and _mode.get() != "compared":
            raise UsageError(
                f"the step calls {type(self.part).__name__}.reset(), in each of {len(self.copies)} replicas; call it "
                "in on_train_epoch_end, on_validation_epoch_end or another hook outside steps"
            )
        if get_replica_context() is None:
            self.plain["reset"]()
            for duplicate in self.copies:
                duplicate.reset()

    def _merged(self) -> Any:
        return _merged(self.strategy, self.part, self.copies)

    def _update_for_call(self, context: ReplicaContext, args: Any, kwargs: Any) -> Any:
        call = self.calls[context.local_replica]
        call.reset()
        call.update(*args, **kwargs)
        return call

    def _note_value(self, merged: Any) -> Any:
        """Computes the value of a call, which ``self.log`` takes as that of the step."""
        value = merged.compute()
        for part, source in zip(nested_metrics(self.part), nested_metrics(merged), strict=True):
            part._forward_cache = source._computed
        return value


def _merged(strategy: Strategy, part: Any, copies: Sequence[Any]) -> Any:
    """A metric with the updates of all copies, and of the metric itself."""
    merged = MirroredMetric(strategy, copies)._merged()
    if not any(nested.update_count for nested in nested_metrics(part)):
        return merged
    return merge_metrics([merged], [states_of(part), states_of(merged)])


def _on_device(value: Any, context: ReplicaContext) -> Any:
    device = context.device.torch_device
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def _itself(part: Any, memo: dict[int, Any]) -> Any:
    return part


def replicate_metrics(module: nn.Module, strategy: Strategy) -> list[ReplicatedMetric]:
    """Replicates the metrics of a module that is not mirrored yet."""
    metrics: list[ReplicatedMetric] = []
    for child in module._modules.values():
        if is_metric(child):
            if ONE_OBJECT not in vars(child):
                metrics.append(ReplicatedMetric(child, strategy))
        elif child is not None:
            metrics += replicate_metrics(child, strategy)
    return metrics
