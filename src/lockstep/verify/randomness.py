"""Takes random draws out of a step, for the length of an experiment in a process of its own.

Dropout becomes the identity. At the level "constant", what else a replica draws from torch becomes a constant of the
same shape; drawing outside replicas, as for initial weights, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.replicas.context import get_replica_context
from lockstep.verify.config import Randomness, Switches

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
