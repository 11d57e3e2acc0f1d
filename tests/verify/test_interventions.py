from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.verify.config import Interventions
from lockstep_tools.verify.interventions import (
    active_dropouts,
    intervene_before_first_step,
    local_batch_norms,
    without_randomness,
)

Make = Callable[..., "MirroredStrategy"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Dropout(0.0))


def test_what_can_be_switched_is_named(make_strategy: Make):
    module = make_strategy(2).mirror(network())
    assert local_batch_norms([module]) == ["1"]
    assert active_dropouts([module]) == ["2"]
    module.eval()
    assert [*local_batch_norms([module]), *active_dropouts([module])] == []


def test_synchronised_batch_norms_are_in_every_copy(make_strategy: Make):
    module = make_strategy(2).mirror(network())
    intervene_before_first_step([module], Interventions(sync_batch_norm=True))
    assert module.has_sync_batchnorm
    assert local_batch_norms([module]) == []


def test_a_nudge_moves_every_weight_once_by_a_rounding_error(make_strategy: Make):
    module = make_strategy(2).mirror(nn.Linear(3, 3))  # the copies share their storage
    before = module.module.weight.detach().clone()
    intervene_before_first_step([module], Interventions(nudge=0.25))
    factors = (module.module.weight.detach() / before).flatten().tolist()
    assert {round(factor, 4) for factor in factors} == {0.75, 1.25}


def test_in_shards_a_module_sees_one_shard_after_another(make_strategy: Make):
    seen = []

    class Counting(nn.Module):
        def forward(self, rows: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
            seen.append(len(rows))
            return {"rows": rows * scale, "one": torch.tensor(1.0)}

    module = make_strategy(1).mirror(Counting())
    intervene_before_first_step([module], Interventions(shards=3))
    outputs = module(torch.arange(7.0), scale=2.0)

    assert seen == [3, 2, 2]
    assert torch.equal(outputs["rows"], 2 * torch.arange(7.0))
    assert outputs["one"].ndim == 0


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
