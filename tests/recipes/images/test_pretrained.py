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
from tests.conftest import MakeStrategy
from tests.recipes.images.conftest import MakeConfig, MakeTree
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep_tools.recipes.images.pretrained import Preparation, load_classifier, preparation_of
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


@pytest.mark.slow
@pytest.mark.parametrize("names_arguments", [True, False], ids=["timm 1.0.31", "without model_args"])
def test_a_model_of_timm_gets_a_head_and_keeps_its_weights_and_normalization(names_arguments: bool, tmp_path: Path):
    timm = pytest.importorskip("timm", reason="needs timm, and the torchvision that goes with this torch")
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", pretrained=False, num_classes=5).eval()
    folder = tmp_path / "timm"
    timm.models.save_for_hf(network, folder, safe_serialization=True)
    settings = json.loads((folder / "config.json").read_text())
    if not names_arguments:  # as older versions of timm have published models
        settings.pop("model_args", None)
        (folder / "config.json").write_text(json.dumps(settings))

    module = load_classifier(str(folder), ["x", "y"], batch_norm_momentum=0.3).eval()

    before, after = network.state_dict(), module.network.timm_model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}
    assert after["fc.weight"].shape[0] == 2
    assert list(module.network.config.id2label.values()) == ["x", "y"]
    published = settings["pretrained_cfg"]
    assert module.preparation == Preparation(
        size=published["input_size"][-1], mean=tuple(published["mean"]), std=tuple(published["std"])
    )
    images = torch.rand(3, 3, module.preparation.size, module.preparation.size)
    plain = network.forward_features((images - module.mean) / module.std)
    assert torch.equal(module.network.timm_model.forward_features((images - module.mean) / module.std), plain)
    assert module(images).shape == (3, 2)


@pytest.mark.slow
def test_a_model_of_timm_is_trained_and_the_result_starts_another(
    make_tree: MakeTree, tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    timm = pytest.importorskip("timm", reason="needs timm, and the torchvision that goes with this torch")
    timm.models.save_for_hf(timm.create_model("test_resnet", pretrained=False, num_classes=5), tmp_path / "timm")
    config = tiny(data=make_tree("data", {"a": 20, "b": 20}), size=32, pretrained=str(tmp_path / "timm"))

    train_images(config, make_strategy(2), output_dir=tmp_path / "trained", verbose=0)

    again = load_classifier(str(tmp_path / "trained"), ["a", "b"], batch_norm_momentum=0.1)
    trained, state = load_file(tmp_path / "trained" / "model.safetensors"), again.network.state_dict()
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
    assert again.preparation.size == 32
