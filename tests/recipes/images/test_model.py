from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.model import new_mobilenet

SMALL = ImagesConfig(size=16, output_stride=8, width_multiplier=0.1)


def test_the_published_model_has_its_published_size():
    with torch.device("meta"):
        module = new_mobilenet(ImagesConfig(size=224), ("cat", "dog"))
    assert sum(p.numel() for p in module.mobilenet_v2.parameters()) == 2_223_872
    assert sum(p.numel() for p in module.classifier.parameters()) == 1281 * 2


def test_the_logits_are_those_of_transformers():
    module = new_mobilenet(SMALL, ("a", "b", "c")).eval()
    theirs = MobileNetV2ForImageClassification(
        MobileNetV2Config(image_size=16, output_stride=8, depth_multiplier=0.1, num_labels=3)
    ).eval()
    theirs.load_state_dict(module.state_dict())
    pictures = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(module(pictures), theirs(pictures).logits)


def test_a_hidden_layer_is_dense_relu_dense():
    module = new_mobilenet(
        ImagesConfig(size=16, output_stride=8, width_multiplier=0.1, hidden=512), tuple("0123456789")
    )
    assert [type(layer) for layer in module.classifier] == [nn.Linear, nn.ReLU, nn.Linear]
    assert module.classifier[0].out_features == 512
    assert module(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_dropout_and_running_statistics_are_torch_s_and_not_tensorflow_s():
    module = new_mobilenet(SMALL, ("a", "b"))
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    assert len(norms) == 52
    assert {norm.momentum for norm in norms} == {0.2}
    assert {norm.eps for norm in norms} == {1e-3}


@pytest.mark.parametrize(("size", "stride"), [(8, 8), (9, 8), (16, 16), (33, 32), (47, 16)])
def test_every_size_from_the_stride_on_is_taken(size: int, stride: int):
    module = new_mobilenet(ImagesConfig(size=size, output_stride=stride, width_multiplier=0.1), ("a", "b"))
    loss = module(torch.rand(2, 3, size, size)).sum()
    loss.backward()
    assert loss.isfinite()


def test_an_empty_shard_has_no_logits():
    module = new_mobilenet(SMALL, ("a", "b")).eval()
    assert module(torch.rand(0, 3, 16, 16)).shape == (0, 2)
