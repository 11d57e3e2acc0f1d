"""Training that starts from a classifier of transformers: what is kept of it, and how its images are prepared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.recipes.images.conftest import MakeConfig, MakeTree
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.recipes.images.pretrained import load_classifier, preparation_of
from lockstep_tools.recipes.images.train import build_images, train_images

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.5]


@pytest.fixture
def resnet(tmp_path: Path) -> Path:
    """A folder with a tiny ResNet of two classes, and the description of its images."""
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic",
        id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1},
    )  # fmt: skip
    folder = tmp_path / "resnet"
    ResNetForImageClassification(config).save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": MEAN, "image_std": STD, "size": {"shortest_edge": 12}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_images_are_normalized_as_the_model_was_trained(resnet: Path):
    module = load_classifier(str(resnet), ["a", "b"], batch_norm_momentum=0.3).eval()
    images = torch.rand(3, 3, 12, 12)
    plain = AutoModelForImageClassification.from_pretrained(resnet).eval()
    normalized = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    assert torch.equal(module(images), plain(normalized).logits)
    assert preparation_of(str(resnet)).size == 12
    assert {norm.momentum for norm in module.modules() if isinstance(norm, torch.nn.BatchNorm2d)} == {0.3}


@pytest.mark.parametrize("classes", [["x", "y"], ["a", "b", "c"]], ids=["other names", "another number"])
def test_other_classes_get_a_new_head_and_keep_the_rest(classes: list[str], resnet: Path):
    before = load_file(resnet / "model.safetensors")
    network = load_classifier(str(resnet), classes, batch_norm_momentum=0.1).network
    after = network.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {"classifier.1.weight", "classifier.1.bias"}
    assert list(network.config.id2label.values()) == classes


def test_a_run_starts_from_the_weights_and_leaves_a_folder_that_starts_another(
    resnet: Path, make_tree: MakeTree, tiny: MakeConfig, split_cpu: Callable[[int], tuple[LogicalDevice, ...]],
    tmp_path: Path,
):  # fmt: skip
    config = tiny(data=make_tree("data", {"a": 20, "b": 20, "c": 20}), size=None, pretrained=str(resnet), epochs=1)
    results: list[Any] = []
    for replicas in (1, 2):
        strategy = MirroredStrategy(list(split_cpu(2)[:replicas]), seed=0)
        folder = tmp_path / f"trained{replicas}"
        results.append(train_images(replace(config, sync_batchnorm=True), strategy, output_dir=folder, verbose=0))
        strategy.close()

    one, two = (result.history.history["loss"] for result in results)
    assert one == pytest.approx(two, rel=1e-4)
    assert results[0].config.side == 12
    again = build_images(tiny(data=tmp_path / "data", size=None, pretrained=str(tmp_path / "trained2"), epochs=1))
    trained = load_file(tmp_path / "trained2" / "model.safetensors")
    assert {name.removeprefix("network.") for name in again.module.state_dict()} == trained.keys()
    assert all(torch.equal(again.module.network.state_dict()[name], tensor) for name, tensor in trained.items())
    assert preparation_of(str(tmp_path / "trained2")).mean == pytest.approx(MEAN)


def test_what_is_no_classifier_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pretrained='.*none' could not be loaded"):
        load_classifier(str(tmp_path / "none"), ["a", "b"], batch_norm_momentum=0.1)
