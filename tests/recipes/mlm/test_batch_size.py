"""The largest batch of the recipe: tried with the longest lines, within the memory there is, nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from lockstep.recipes import training
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.train import build_mlm, find_largest_batch
from lockstep.replicas.cpu.memory import resident_mb

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]
    MakeConfig = Callable[..., MlmConfig]


def test_no_batch_of_the_data_is_larger_than_the_made_up_one(tiny: MakeConfig):
    train = build_mlm(tiny()).train
    before = [x["input_ids"].clone() for x, _ in train]
    x, labels = train.dummy_batch(13)

    assert x["input_ids"].shape == (13, 48)
    assert x["attention_mask"].all()
    for real, real_labels in train:
        assert real_labels.shape[1] <= labels.shape[1]
        assert all(real[name].numel() <= x[name].numel() for name in x)
    assert all(torch.equal(x["input_ids"], ids) for (x, _), ids in zip(train, before, strict=True))


def test_there_is_no_batch_larger_than_the_training_part(tiny: MakeConfig, make_strategy: MakeStrategy):
    found = find_largest_batch(tiny(), make_strategy(3))

    assert (found.size, found.examples) == (99, 100)


def test_what_does_not_fit_is_not_found(tiny: MakeConfig, make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch):
    """48 tokens of width 64 in a layer with feed_forward 8,192: over 1.5 MB of activations a line."""
    monkeypatch.setattr(training, "default_budget_mb", lambda _: resident_mb() + 80)
    find_largest_batch(tiny(hidden=64, feed_forward=8192), make_strategy(2))  # what a first search imports stays
    found = find_largest_batch(tiny(hidden=64, feed_forward=8192), make_strategy(2))

    assert 4 <= found.size <= 60
    assert found.memory_mb is not None


def test_the_strategy_trains_on_afterwards(tiny: MakeConfig, make_strategy: MakeStrategy):
    from lockstep.recipes.mlm.train import train_mlm

    searched, fresh = make_strategy(2), make_strategy(2)
    find_largest_batch(tiny(dropout=0.5), searched)

    losses = [train_mlm(tiny(dropout=0.5), each, verbose=0).history.history["loss"] for each in (searched, fresh)]
    assert losses[0] == losses[1]
