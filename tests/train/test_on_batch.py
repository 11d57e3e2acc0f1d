"""train_on_batch, test_on_batch and predict_on_batch, beside a hand-written loop on one device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.train.conftest import MakeStrategy, weights
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lockstep.errors import NonFiniteLossError, UsageError
from lockstep.train.model import Model

SIZES = (8, 8, 5)


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 4, generator=random),
            torch.randint(3, (size,), generator=random),
            torch.rand(size, generator=random),
        )
        for size in SIZES
    ]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make_model(strategy: Any, **settings: Any) -> Model:
    with strategy.scope():
        model = Model(network())
        model.compile(
            lambda parameters: torch.optim.Adam(parameters, 0.1),
            nn.CrossEntropyLoss(reduction="none"),
            metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
            **settings,
        )
    return model


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_call_is_one_step_of_a_plain_loop(make_strategy: MakeStrategy, replicas: int, weighted: bool):
    model, module = make_model(make_strategy(replicas), accumulate=4), network()
    optimizer = torch.optim.Adam(module.parameters(), 0.1)

    for x, y, weight in batches():
        logs = model.train_on_batch(x.numpy(), y.numpy(), weight if weighted else None)

        outputs = module(x)
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        loss = (losses * weight if weighted else losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (outputs.argmax(1) == y).float().mean().item()
        assert logs == {"loss": pytest.approx(loss.item(), abs=1e-6), "accuracy": pytest.approx(accuracy)}

    for own, expected in zip(weights(model), module.state_dict().values(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert model.training_state.position.step == len(SIZES)
    assert model.module.training


def test_one_batch_is_tested_and_predicted(make_strategy: MakeStrategy):
    model = make_model(make_strategy(2))
    for x, y, weight in batches():
        assert model.test_on_batch(x, y, weight) == model.evaluate([(x, y, weight)], verbose=0)
        torch.testing.assert_close(model.predict_on_batch(x.numpy()), model.predict([x]))


def test_fit_goes_on_after_single_batches(make_strategy: MakeStrategy):
    parts = [(x, y) for x, y, _ in batches()]
    whole, model = make_model(make_strategy(2)), make_model(make_strategy(2))

    whole.fit(parts, epochs=3, verbose=0)
    for _ in range(2):
        for x, y in parts[:2]:
            model.train_on_batch(x, y)
        model.fit(parts[2:], verbose=0)
    for x, y in parts:
        model.train_on_batch(x, y)

    assert all(map(torch.equal, weights(whole), weights(model)))
    assert model.training_state.position.step == whole.training_state.position.step


def test_a_bad_batch_leaves_the_weights_and_the_next_one_trains(make_strategy: MakeStrategy):
    model = make_model(make_strategy(2))
    before, (x, y, _) = weights(model), batches()[0]
    with pytest.raises(NonFiniteLossError):
        model.train_on_batch(x * torch.nan, y)
    assert all(map(torch.equal, before, weights(model)))
    other = make_model(make_strategy(2))
    assert model.train_on_batch(x, y) == other.train_on_batch(x, y)
    assert all(map(torch.equal, weights(other), weights(model)))


def test_a_model_ends_with_its_last_reference(make_strategy: MakeStrategy):
    model = make_model(make_strategy(2))
    x, y, _ = batches()[0]
    model.train_on_batch(x, y)
    gc.collect()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_only_a_model_with_an_optimizer_trains(make_strategy: MakeStrategy):
    x, y, _ = batches()[0]
    with make_strategy(1).scope():
        model = Model(network())
    with pytest.raises(UsageError, match=r"train_on_batch.*compile"):
        model.train_on_batch(x, y)
    model.compile(loss=nn.CrossEntropyLoss())
    with pytest.raises(UsageError, match=r"train_on_batch.*optimizer"):
        model.train_on_batch(x, y)
