from __future__ import annotations

import pytest
import torch
from tests.recipes.conftest import MakeConfig

from lockstep_tools.recipes.mlm.train import (
    build_mlm,
    build_optimizer,
    build_scheduler,
    num_updates,
)


def test_the_parts_fit_together(tiny: MakeConfig):
    task = build_mlm(tiny())
    assert (len(task.train), len(task.valid), len(task.test)) == (8, 2, 2)
    assert len(task.tokenizer) == 400
    x, y = task.valid[0]
    assert task.module(**x).shape == (int((y != -100).sum()), 400)


def test_the_seed_decides_weights_order_and_masks(tiny: MakeConfig):
    first, same, other = (build_mlm(tiny(seed=seed)) for seed in (1, 1, 2))

    def fingerprint(task: object) -> list[torch.Tensor]:
        parts = [next(iter(task.train))[0]["input_ids"], task.valid[0][1], task.test[0][1]]  # type: ignore[attr-defined]
        return [task.module.bert.embeddings.word_embeddings.weight, *parts]  # type: ignore[attr-defined]

    assert all(torch.equal(a, b) for a, b in zip(fingerprint(first), fingerprint(same), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(fingerprint(first), fingerprint(other), strict=True))


def test_the_callers_random_numbers_are_left_alone(tiny: MakeConfig):
    state = torch.get_rng_state()
    build_mlm(tiny())
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_and_test_have_masks_of_their_own_that_stay(tiny: MakeConfig, lines: list[str]):
    task = build_mlm(tiny())
    before = [y.clone() for _, y in (*task.valid, *task.test)]
    task.train.set_epoch(3)
    list(task.train)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, (*task.valid, *task.test), strict=True))


def test_adam_trains_everything_but_the_pooler(tiny: MakeConfig):
    config = tiny(learning_rate=0.25)
    module = build_mlm(config).module

    optimizer = build_optimizer(config, module.parameters())

    trained = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert {name for name, p in module.named_parameters() if id(p) not in trained} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    }
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_fused_adam_takes_the_steps_of_the_plain_one(tiny: MakeConfig):
    config = tiny()
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    optimizers = [build_optimizer(config, weights[:1]), torch.optim.Adam(weights[1:], config.first_rate, foreach=False)]
    for _ in range(5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = weight.detach() ** 2
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def test_the_rate_falls_linearly_to_zero_over_all_updates(tiny: MakeConfig):
    config = tiny(learning_rate=0.8, accumulate=3, epochs=2)
    task = build_mlm(config)
    optimizer = build_optimizer(config, task.module.parameters())

    steps = num_updates(config, len(task.train))
    scheduler = build_scheduler(optimizer, steps=steps)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps + 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    assert steps == 6  # two whole cycles and a cut one in each epoch of eight batches
    assert rates == pytest.approx([0.8 * (1 - step / 6) for step in range(7)] + [0.0])


def test_gradient_checkpointing_reaches_every_layer_and_changes_no_gradient(tiny: MakeConfig):
    task = build_mlm(tiny(gradient_checkpointing=True))
    (x, _), *_ = task.valid

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        task.module.zero_grad()
        task.module.train()(**x).square().mean().backward()
        return [parameter.grad for parameter in task.module.parameters() if parameter.grad is not None]

    layers = task.module.bert.encoder.layer
    assert all(layer.gradient_checkpointing for layer in layers)
    checkpointed = gradients()
    for layer in layers:
        layer.gradient_checkpointing = False

    assert checkpointed
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(checkpointed, gradients(), strict=True))
