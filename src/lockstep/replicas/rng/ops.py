"""Which operators draw; and the two functions of torch's that hot loops draw with, written again with a generator.

Each of the two takes the generator, then the arguments of the function that it replaces, and has that function's
meaning, scaling and gradients (see torch.nn.functional). Tensors are on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from lockstep._torch_compat import safe_softmax


def dropout(
    generator: torch.Generator, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Zeroes single elements."""
    if not training or not 0 < p <= 1:
        return F.dropout(input, p, training, inplace)
    result = _zero(input, torch.empty_like(input), p, generator)
    return input.copy_(result) if inplace else result


def _zero(input: torch.Tensor, noise: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    # The mask is scaled, not the result: one pass over the input, and p = 1 gives 0 without 0 / 0.
    return input * (noise.zero_() if p >= 1 else noise.bernoulli_(1 - p, generator=generator).div_(1 - p))


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
    {F.dropout: dropout, F.scaled_dot_product_attention: attention}
)
"""torch's functions, and what replaces each."""


def draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator, such as ``torch.ops.aten.bernoulli.p``, draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    # Attention is marked as random for its dropout, whatever that is.
    return "dropout_p" not in names or bool(values.get("dropout_p"))
