"""Gives one replica a single shard of every batch, as one of several replicas would get it; for an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.leaves import has_rows, rows_of, rows_taken
from lockstep.data.shards import shard_sizes
from lockstep.mirroring.batch_norm import SyncBatchNorm, convert_sync_batch_norm, has_sync_batch_norm
from lockstep.mirroring.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import Strategy
from lockstep.verify.config import Randomness, Switches


class ModuleSwitches:
    """Applies ``Switches`` to mirrored modules, and says what there is to switch."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    @property
    def hold_weights(self) -> bool:
        """Whether parameters get the values of their last update back."""
        return self._switches.hold_weights

    def batch_norms(self, modules: Sequence[MirroredModule]) -> Iterator[str]:
        """The names of the batch norms that take the statistics of a replica's shard."""
        for name, part in _named_parts(modules):
            if isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm) and part.training:
                yield name

    def dropouts(self, modules: Sequence[MirroredModule]) -> Iterator[str]:
        """The names of the dropout modules that drop something."""
        for name, part in _named_parts(modules):
            if isinstance(part, _DropoutNd) and part.training and part.p > 0:
                yield name

    def before_first_step(self, modules: Sequence[MirroredModule]) -> None:
        """Outside replicas, before the first run."""
        for module in modules:
            if self._switches.batch_norm == "synced":
                _synchronise(module)
            if self._switches.nudge:
                _nudge(module, self._switches.nudge)
            if self._switches.shards > 1 and self._switches.shard is None:
                module.module.forward = _in_shards(module.module.forward, self._switches.shards)

    def before_run(self, modules: Sequence[MirroredModule]) -> None:
        """Outside replicas, before every run; a run gives all copies the training mode of the user's module first."""
        if self._switches.batch_norm == "frozen":
            for part in (part for module in modules for copy in module.copies for part in copy.modules()):
                if isinstance(part, _BatchNorm):
                    part.eval()


def _named_parts(modules: Sequence[MirroredModule]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        for name, part in module.module.named_modules():
            yield name or type(part).__name__, part


def _synchronise(module: MirroredModule) -> None:
    for duplicate in module.copies:
        convert_sync_batch_norm(duplicate)
    module.has_sync_batchnorm = has_sync_batch_norm(module.module)


@torch.no_grad()
def _nudge(module: MirroredModule, relative: float) -> None:
    """Every weight up or down by a rounding error. Copies that share their storage are moved once."""
    seen: set[int] = set()
    for duplicate in module.copies:
        generator = torch.Generator().manual_seed(0)
        for parameter in duplicate.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            if parameter.data_ptr() not in seen and parameter.is_floating_point():
                parameter.mul_(1 + relative * sign.to(parameter.device, parameter.dtype))
            seen.add(parameter.data_ptr())


def _in_shards(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``forward`` called once for each shard of its arguments' rows, the outputs placed one after another."""

    def in_shards(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not lengths or lengths[0] < 2:
            return forward(*args, **kwargs)
        results = []
        begin = 0
        for size in shard_sizes(lengths[0], min(number, lengths[0])):
            own = [_part(leaf, lengths[0], begin, size) for leaf in leaves]
            begin += size
            shard_args, shard_kwargs = tree_unflatten(own, spec)
            results.append(forward(*shard_args, **shard_kwargs))
        columns = iter(zip(*(tree_leaves(result) for result in results), strict=True))
        return tree_map(lambda _: _joined(next(columns)), results[0])

    return in_shards


def _part(leaf: Any, rows: int, begin: int, size: int) -> Any:
    divided = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
    return leaf[begin : begin + size] if divided else leaf


def _joined(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]


_DROPOUTS = (
    *((F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")),
    *((F, "feature_alpha_dropout"), (torch, "dropout"), (torch, "alpha_dropout"), (torch, "feature_dropout")),
)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# What is drawn, and the middle of what it can be.
_UNIFORM = ("rand", "rand_like")
_NORMAL = ("randn", "randn_like")
_IN_PLACE = {"uniform_": 0.5, "normal_": 0.0, "exponential_": 1.0, "bernoulli_": 1.0}


@contextmanager
def without_randomness(level: Randomness) -> Iterator[None]:
    """Replaces torch's random functions inside the block; process-wide.

    Args:
        level: of ``Switches.randomness``.
    """
    with ExitStack() as stack:
        if level != Switches().randomness:
            for place, name in _DROPOUTS:
                stack.enter_context(patch.object(place, name, _identity))
            attention = F.scaled_dot_product_attention
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", _without_dropout(attention)))
            for name in _RECURRENT:
                original = getattr(torch._VF, name)
                stack.enter_context(patch.object(torch._VF, name, _recurrent(original)))
        if level == "constant":
            for name in (*_UNIFORM, *_NORMAL):
                constant = 0.5 if name in _UNIFORM else 0.0
                stack.enter_context(patch.object(torch, name, _constant(getattr(torch, name), constant)))
            stack.enter_context(patch.object(torch, "bernoulli", _likelier(torch.bernoulli)))
            for name, constant in _IN_PLACE.items():
                stack.enter_context(patch.object(Tensor, name, _filled(getattr(Tensor, name), constant)))
        yield


def _identity(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        kwargs.pop("dropout_p", None)
        return attention(query, key, value, mask, 0.0, *args[2:], **kwargs)

    return call


def _recurrent(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm(input, hx, weights, bias, layers, dropout, ...): packed sequences put the weights one place later."""

    def call(*args: Any) -> Any:
        place = 6 if isinstance(args[3], (tuple, list)) else 5
        return original(*args[:place], 0.0, *args[place + 1 :])

    return call


def _constant(original: Callable[..., Tensor], constant: float) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        drawn = original(*args, **kwargs)
        return drawn if get_replica_context() is None else torch.full_like(drawn, constant)

    return call


def _likelier(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if get_replica_context() is None or args or "p" in kwargs:
            return original(input, *args, **kwargs)
        return (input >= 0.5).to(input.dtype)

    return call


def _filled(original: Callable[..., Tensor], constant: float) -> Callable[..., Tensor]:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if get_replica_context() is None:
            return original(self, *args, **kwargs)
        with torch.no_grad():
            return self.fill_(constant)

    return call


@contextmanager
def one_shard(shard: int | None, number: int) -> Iterator[None]:
    """Cuts the batches that strategies of one replica run on, inside the block; process-wide.

    Args:
        shard: which, from 0; None cuts nothing.
        number: of shards.
    """
    if shard is None:
        yield
        return
    with patch.object(Strategy, "run", _cut_run(Strategy.run, shard, number)):
        yield


def _cut_run(original: Callable[..., Any], shard: int, number: int) -> Callable[..., Any]:
    def run(self: Strategy, fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        rows = next((rows_of(leaf[0]) or 0 for leaf in tree_leaves((args, kwargs)) if _is_divided(leaf)), 0)
        sizes = shard_sizes(rows, number)
        start = sum(sizes[:shard])

        def cut(leaf: Any) -> Any:
            if not _is_divided(leaf) or rows_of(leaf[0]) != rows:
                return leaf
            return PerReplica([rows_taken(leaf[0], start, sizes[shard])])

        return original(self, fn, tree_map(cut, args), tree_map(cut, kwargs))

    return run


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica) and len(leaf) == 1 and has_rows(leaf[0])
