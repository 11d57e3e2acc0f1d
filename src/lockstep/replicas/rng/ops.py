"""torch's functions that draw random numbers but take no generator, written again with one.

Each takes the generator, then the arguments of the function that it replaces, and has that function's meaning, scaling
and gradients (see torch.nn.functional). Tensors are on the CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from lockstep._torch_compat import safe_softmax

# Klambauer et al. 2017, "Self-Normalizing Neural Networks": the value that alpha dropout sets units to.
_SELU_SATURATION = -1.7580993408473766


def _dropout(function: Any, *, batched_ndim: int | None = None, alpha: bool = False) -> Callable[..., torch.Tensor]:
    """One of torch's dropout functions with a generator.

    Args:
        function: torch's.
        batched_ndim: drops whole channels of inputs [N, C, ...] of at least so many dimensions, and [C, ...] below;
            None drops single elements.
        alpha: sets elements to SELU's negative saturation, keeping mean and variance, instead of to zero.
    """
    default = inspect.signature(function).parameters["training"].default
    drop = _alpha if alpha else _zero

    def dropout(
        generator: torch.Generator, input: torch.Tensor, p: float = 0.5, training: bool = default, inplace: bool = False
    ) -> torch.Tensor:
        if not training or not 0 < p <= 1:
            untouched: torch.Tensor = function(input, p, training, inplace)
            return untouched
        if batched_ndim is None:
            noise = torch.empty_like(input)
        else:
            kept = 2 if input.ndim >= batched_ndim else 1
            noise = input.new_empty(input.shape[:kept] + (1,) * (input.ndim - kept))
        result = drop(input, noise, p, generator)
        return input.copy_(result) if inplace else result

    return dropout


def _zero(input: torch.Tensor, noise: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    return input * (noise.zero_() if p >= 1 else noise.bernoulli_(1 - p, generator=generator).div_(1 - p))


def _alpha(input: torch.Tensor, noise: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    if p >= 1:
        return input * 0
    kept = noise.bernoulli_(1 - p, generator=generator)
    scale = 1 / math.sqrt((1 - p) * (1 + p * _SELU_SATURATION**2))
    shift = scale * _SELU_SATURATION
    return input * (kept * scale) + ((1 - kept) * shift + p * -shift)


def rrelu(
    generator: torch.Generator,
    input: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """Leaky ReLU with a slope drawn uniformly from [lower, upper) for each negative element."""
    if not training:
        return F.rrelu(input, lower, upper, training, inplace)
    slopes = torch.empty_like(input).uniform_(lower, upper, generator=generator)
    result = torch.where(input >= 0, input, input * slopes)
    return input.copy_(result) if inplace else result


def attention(
    generator: torch.Generator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention. With dropout torch uses the same unfused path on a CPU, so nothing is lost."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query * (1 / math.sqrt(query.size(-1)) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    weights = safe_softmax(scores, -1)  # a row with no key to attend to gives zeros, not NaN, as in torch
    return torch.matmul(_zero(weights, torch.empty_like(weights), dropout_p, generator), value)


REWRITTEN: Mapping[Any, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        F.dropout: _dropout(F.dropout),
        F.dropout1d: _dropout(F.dropout1d, batched_ndim=3),
        F.dropout2d: _dropout(F.dropout2d, batched_ndim=0),
        F.dropout3d: _dropout(F.dropout3d, batched_ndim=5),
        F.alpha_dropout: _dropout(F.alpha_dropout, alpha=True),
        F.feature_alpha_dropout: _dropout(F.feature_alpha_dropout, batched_ndim=0, alpha=True),
        F.rrelu: rrelu,
        F.scaled_dot_product_attention: attention,
    }
)
"""torch's functions, and what replaces each."""
