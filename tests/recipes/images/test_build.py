from __future__ import annotations

import pytest
import torch
from tests.recipes.images.conftest import MakeConfig, MakeTree

from lockstep_tools.recipes.images.train import build_images, build_metrics, build_optimizer, image_loss


def test_the_parts_fit_together(make_tree: MakeTree, tiny: MakeConfig):
    task = build_images(tiny(data=make_tree("data", {"a": 20, "b": 20, "c": 20})))
    assert (len(task.train), len(task.valid), len(task.test)) == (5, 1, 1)
    x, y = next(iter(task.train))
    assert task.module(x).shape == (11, 3)
    assert image_loss(task.module(x), y).shape == (11,)
    assert task.module.mobilenet_v2.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_without_a_share_there_is_no_validation(make_tree: MakeTree, tiny: MakeConfig):
    task = build_images(tiny(data=make_tree("data", {"a": 5, "b": 5}), valid_fraction=0.0))
    assert task.valid == ()


def test_only_the_training_part_is_shuffled(make_tree: MakeTree, tiny: MakeConfig):
    task = build_images(tiny(data=make_tree("data", {"a": 30, "b": 30})))

    def labels(batches: object) -> list[int]:
        return torch.cat([y for _, y in batches]).tolist()  # type: ignore[attr-defined]

    assert labels(task.valid) == sorted(labels(task.valid))
    assert labels(task.test) == sorted(labels(task.test))
    first = labels(task.train)
    task.train.set_epoch(1)
    assert labels(task.train) != first


def test_the_seed_decides_weights_and_order(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 20, "b": 20})

    def fingerprint(seed: int) -> list[torch.Tensor]:
        task = build_images(tiny(data=root, seed=seed))
        return [task.module.mobilenet_v2.conv_stem.first_conv.convolution.weight, next(iter(task.train))[0]]

    first, same, other = fingerprint(1), fingerprint(1), fingerprint(2)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_callers_random_numbers_are_left_alone(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 20, "b": 20})
    state = torch.get_rng_state()
    list(build_images(tiny(data=root, workers=1)).train)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_per_picture_and_not_in_half_precision():
    logits, labels = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    loss = image_loss(logits.bfloat16(), labels)
    assert loss.dtype == torch.float32
    assert loss.tolist() == pytest.approx([0.6931, 2.1269], abs=1e-4)
    assert image_loss(logits.double(), labels).dtype == torch.float64


def test_adam_has_the_rate_and_the_metric_is_the_accuracy(tiny: MakeConfig):
    optimizer = build_optimizer(tiny(learning_rate=0.25), [torch.nn.Parameter(torch.zeros(1))])
    metric = build_metrics()["accuracy"]
    metric.update(torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1, 1]))
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert float(metric.compute()) == pytest.approx(2 / 3)
