"""Applies ``Interventions`` to a run: to its mirrored modules, and to torch's random functions.

The patches of torch are process-wide, which is why every run has a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep._torch_compat import VF, BatchNormBase, DropoutBase, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lockstep.data.sharding import shard_sizes
from lockstep.mirroring.module.batch_norm import SyncBatchNorm, convert_sync_batch_norm, has_sync_batch_norm
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep_tools.verify.config import Interventions, Randomness


def local_batch_norms(modules: Sequence[MirroredModule]) -> list[str]:
    """The names of the batch norms that take statistics over a replica's shard."""
    return [
        name
        for name, part in _named_modules(modules)
        if isinstance(part, BatchNormBase) and not isinstance(part, SyncBatchNorm) and part.training
    ]


def active_dropouts(modules: Sequence[MirroredModule]) -> list[str]:
    """The names of the dropout modules in training mode with p > 0."""
    return [
        name for name, part in _named_modules(modules) if isinstance(part, DropoutBase) and part.training and part.p > 0
    ]


def intervene_before_first_step(modules: Sequence[MirroredModule], interventions: Interventions) -> None:
    """Synchronises batch norms, nudges weights, shards the forward. Called outside replicas, before the first run."""
    for module in modules:
        if interventions.sync_batch_norm:
            for duplicate in module.copies:
                convert_sync_batch_norm(duplicate)
            module.has_sync_batchnorm = has_sync_batch_norm(module.module)
        if interventions.nudge:
            _nudge(module, interventions.nudge)
        if interventions.shards > 1:
            module.module.forward = _forward_by_shard(module.module.forward, interventions.shards)


def _named_modules(modules: Sequence[MirroredModule]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        for name, part in module.module.named_modules():
            yield name or type(part).__name__, part


@torch.no_grad()
def _nudge(module: MirroredModule, relative: float) -> None:
    """Moves every weight up or down by ``relative``; copies that alias their storage are moved once."""
    pointers: set[int] = set()
    for duplicate in module.copies:
        generator = torch.Generator().manual_seed(0)
        for parameter in duplicate.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            # On a CPU the copies alias one storage, which would be moved once for each replica.
            if parameter.data_ptr() not in pointers and parameter.is_floating_point():
                parameter.mul_(1 + relative * sign.to(parameter.device, parameter.dtype))
            pointers.add(parameter.data_ptr())


def _forward_by_shard(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``forward`` called once per shard of its arguments' rows; the outputs are concatenated."""

    def by_shard(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not lengths or lengths[0] < 2:
            return forward(*args, **kwargs)
        rows, begin, results = lengths[0], 0, []
        for size in shard_sizes(rows, min(number, rows)):
            shard = [
                leaf[begin : begin + size] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows else leaf
                for leaf in leaves
            ]
            begin += size
            shard_args, shard_kwargs = tree_unflatten(shard, spec)
            results.append(forward(*shard_args, **shard_kwargs))
        columns = iter(zip(*(tree_leaves(result) for result in results), strict=True))
        return tree_map(lambda _: _concatenate(next(columns)), results[0])

    return by_shard


def _concatenate(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]


_DROPOUTS = (
    *((F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")),
    *((F, "feature_alpha_dropout"), (torch, "dropout"), (torch, "alpha_dropout"), (torch, "feature_dropout")),
)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Each random function, and the constant that replaces its draws: the middle of their distribution.
_DRAWS = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0}
_DRAWS_IN_PLACE = {"uniform_": 0.5, "normal_": 0.0, "exponential_": 1.0, "bernoulli_": 1.0}


@contextmanager
def without_randomness(level: Randomness) -> Iterator[None]:
    """In the block dropout is the identity, and at level "constant" all other draws inside replicas are constants."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

        if level != "unchanged":
            for owner, name in _DROPOUTS:
                replace(owner, name, lambda _: lambda input, *_, **__: input)
            replace(F, "scaled_dot_product_attention", _attention_without_dropout)
            for name in _RECURRENT:
                replace(VF, name, _recurrent_without_dropout)
        if level == "constant":
            for name, constant in _DRAWS.items():
                replace(torch, name, partial(_constant, value=constant))
            replace(torch, "bernoulli", _most_likely)
            for name, constant in _DRAWS_IN_PLACE.items():
                replace(Tensor, name, partial(_constant_in_place, value=constant))
        yield


def _attention_without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The signature is attn_mask, dropout_p, is_causal: both may come by position.
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        kwargs.pop("dropout_p", None)
        return attention(query, key, value, mask, 0.0, *args[2:], **kwargs)

    return call


def _recurrent_without_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm(input, hx, weights, bias, layers, dropout, ...); packed sequences have one argument more."""

    def call(*args: Any) -> Any:
        place = 6 if isinstance(args[3], (tuple, list)) else 5
        return original(*args[:place], 0.0, *args[place + 1 :])

    return call


def _constant(original: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        # Drawn all the same, so that dtype, device and errors are those of torch, and the generator goes on as before.
        drawn = original(*args, **kwargs)
        return drawn if get_replica_context() is None else torch.full_like(drawn, value)

    return call


def _most_likely(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if get_replica_context() is None or args or "p" in kwargs:
            return original(input, *args, **kwargs)
        return (input >= 0.5).to(input.dtype)

    return call


def _constant_in_place(original: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if get_replica_context() is None:
            return original(self, *args, **kwargs)
        with torch.no_grad():
            return self.fill_(value)

    return call
