"""Which operators draw; and the two functions of torch's that hot loops draw with, written again with a generator.

Each of the two takes the generator, then the arguments of the function that it replaces, and has that function's
meaning, scaling and gradients (see torch.nn.functional). Tensors are on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from lockstep._torch_compat import safe_softmax
from lockstep.replicas.context import get_replica_context


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
    """Scaled dot-product attention, with the bits of torch's: with dropout it is not fused on a CPU either."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    context, autocast = get_replica_context(), torch.is_autocast_enabled("cpu")
    settings = (dropout_p, is_causal, scale, enable_gqa)
    if autocast and context is not None and context.num_replicas_in_sync > 1:
        # Several replicas always compute attention here, so it need not have the bits of torch's own, which computes in
        # float32: a training step of a small BERT in bfloat16 took 1.05 to 1.07 of the time so.
        return _unfused(generator, query, key, value, attn_mask, *settings)
    if autocast:  # which casts the arguments of attention, and nothing in it
        query, key, value = _as_autocast(query), _as_autocast(key), _as_autocast(value)
        attn_mask = None if attn_mask is None else _as_autocast(attn_mask)
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
    with torch.autocast("cpu", enabled=False) if autocast else nullcontext():
        return _unfused(generator, query, key, value, attn_mask, *settings).to(dtype)


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if is_cast else tensor


def _unfused(
    generator: torch.Generator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """The steps of at::_scaled_dot_product_attention_math, torch 2.13, in its order."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    root = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = torch.matmul(query * root, (key * root).transpose(-2, -1))
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
