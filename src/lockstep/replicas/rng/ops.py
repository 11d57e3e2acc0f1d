"""torch's functions that draw random numbers but take no generator, written again with one.

Each has the meaning, the scaling and the argument order of the function it stands for (see torch.nn.functional); only
the numbers come from ``generator``. All are differentiable in ``input``. Shapes: any, unless stated; CPU tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lockstep._torch_compat import safe_softmax

# Klambauer et al. 2017, "Self-Normalizing Neural Networks": the value that alpha dropout sets units to.
_SELU_SATURATION = -1.7580993408473766


def dropout(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Zeroes elements with probability ``p`` and scales the others by 1 / (1 - p)."""
    return input * _kept(torch.empty_like(input), p, generator)


def feature_dropout(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Zeroes whole channels of ``input`` [N, C, ...] with probability ``p``."""
    return input * _kept(_per_channel(input), p, generator)


def feature_dropout_1d(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Zeroes whole channels of ``input``, [N, C, L] or [C, L], with probability ``p``."""
    return feature_dropout(input, p, generator) if input.ndim > 2 else _unbatched(input, p, generator)


def feature_dropout_3d(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Zeroes whole channels of ``input``, [N, C, D, H, W] or [C, D, H, W], with probability ``p``."""
    return feature_dropout(input, p, generator) if input.ndim > 4 else _unbatched(input, p, generator)


def alpha_dropout(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Sets elements to SELU's negative saturation with probability ``p``, keeping mean and variance."""
    return _alpha(input, torch.empty_like(input), p, generator)


def feature_alpha_dropout(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Alpha dropout of whole channels of ``input`` [N, C, ...]."""
    return _alpha(input, _per_channel(input), p, generator)


def rrelu(input: torch.Tensor, lower: float, upper: float, generator: torch.Generator) -> torch.Tensor:
    """Leaky ReLU with a slope drawn uniformly from [lower, upper) for each negative element."""
    slopes = torch.empty_like(input).uniform_(lower, upper, generator=generator)
    return torch.where(input >= 0, input, input * slopes)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    generator: torch.Generator,
) -> torch.Tensor:
    """scaled_dot_product_attention with dropout of the attention weights.

    With dropout torch takes the same unfused path on a CPU (math backend), so this costs no fusion.

    Args:
        query: [..., heads, queries, width].
        key: [..., heads, keys, width].
        value: [..., heads, keys, value width].
        mask: None, boolean (True takes part) or added to the scores; broadcast to [..., heads, queries, keys].
        p: probability of zeroing a weight.
        is_causal: query i sees keys 0 to i.
        scale: multiplies the scores; None is 1 / sqrt(width).
        enable_gqa: key and value have fewer heads, each shared by a group of query heads.
        generator: the source of the numbers.
    """
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query * (1 / math.sqrt(query.size(-1)) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # A row with no key to see gives zeros, not NaN, as in torch.
    weights = safe_softmax(scores, -1)
    return torch.matmul(dropout(weights, p, generator), value)


def _unbatched(input: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    return feature_dropout(input.unsqueeze(0), p, generator).squeeze(0)


def _per_channel(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape[:2] + (1,) * (input.ndim - 2))


def _kept(noise: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    if p >= 1:
        return noise.zero_()
    return noise.bernoulli_(1 - p, generator=generator).div_(1 - p)


def _alpha(input: torch.Tensor, noise: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    if p >= 1:
        return input * 0
    kept = noise.bernoulli_(1 - p, generator=generator)
    scale = 1 / math.sqrt((1 - p) * (1 + p * _SELU_SATURATION**2))
    shift = scale * _SELU_SATURATION
    return input * (kept * scale) + ((1 - kept) * shift + p * -shift)


def inplace(input: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Writes ``result`` into ``input``, as the in-place form of a function does; autograd follows."""
    return input.copy_(result)


DROPOUTS = {
    F.dropout: dropout,
    F.dropout1d: feature_dropout_1d,
    F.dropout2d: feature_dropout,
    F.dropout3d: feature_dropout_3d,
    F.alpha_dropout: alpha_dropout,
    F.feature_alpha_dropout: feature_alpha_dropout,
}
"""torch's dropout functions, all called as (input, p=0.5, training, inplace), and what stands for each."""
