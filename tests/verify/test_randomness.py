from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.verify.interventions import without_randomness

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

X = torch.ones(4, 6)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Dropout(0.5),
        lambda: nn.AlphaDropout(0.5),
        lambda: nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True),
        encoder,
    ],
)
def test_no_module_drops_anything(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    module = make().train()
    with without_randomness("no dropout"):
        first, second = (module(X[None])[0] for _ in range(2))
        expected = module.eval()(X[None])[0]
    module.train()

    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, expected)
    assert not torch.equal(module(X[None])[0], module(X[None])[0])  # all is as it was


def test_attention_drops_nothing():
    query = torch.randn(1, 2, 3, 4)
    with without_randomness("no dropout"):
        first = F.scaled_dot_product_attention(query, query, query, dropout_p=0.9)
        positional = F.scaled_dot_product_attention(query, query, query, None, 0.9, True)

    torch.testing.assert_close(first, F.scaled_dot_product_attention(query, query, query))
    torch.testing.assert_close(positional, F.scaled_dot_product_attention(query, query, query, is_causal=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3),
        lambda: torch.randn_like(X),
        lambda: torch.bernoulli(0.3 * X),
        lambda: torch.empty(5).uniform_(),
        lambda: torch.empty(5).normal_(),
    ],
)
def test_in_replicas_draws_become_constants(draw: Callable[[], Any], make_strategy: Callable[..., MirroredStrategy]):
    strategy = make_strategy(2)
    with without_randomness("constant"):
        first, second = strategy.local_results(strategy.run(draw))
        outside = draw()

    assert torch.equal(first, second)
    assert len(set(first.flatten().tolist())) == 1
    assert len(set(outside.flatten().tolist())) > 1  # initial weights are drawn as ever


def test_as_written_nothing_is_replaced():
    before = F.dropout
    with without_randomness("unchanged"):
        assert F.dropout is before
