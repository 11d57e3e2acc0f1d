"""The models in torch alone compute what transformers' own do, from the same weights."""

from __future__ import annotations

import torch

from benchmarks.gpu.models import PlainBert, PlainMobileNetV2, same_padding
from benchmarks.loops import trained_parameters
from lockstep.recipes.mlm.model import BertShape, new_bert

SHAPE = BertShape(layers=2, hidden=32, heads=2, feed_forward=64, vocabulary=100, positions=16)


def test_the_bert_is_transformers_own():
    torch.manual_seed(0)
    theirs = new_bert(SHAPE).eval()
    ours = PlainBert(SHAPE).eval()
    missing, others = ours.load_state_dict(theirs.state_dict(), strict=False)

    assert missing == []
    assert {name.rpartition(".")[0] for name in others} == {"bert.pooler.dense", "cls.predictions"}  # unused; tied
    tokens = torch.randint(5, 100, (3, 16))
    positions = torch.tensor([[1, 4], [0, 15], [7, 8]])
    torch.testing.assert_close(ours(tokens, positions), theirs(tokens, masked_positions=positions))


def test_bert_tiny_trains_as_many_parameters_as_the_recipe():
    with torch.device("meta"):
        assert trained_parameters(PlainBert(BertShape())) == trained_parameters(new_bert(BertShape()))


def test_the_mobilenet_is_transformers_own():
    import transformers

    torch.manual_seed(0)
    theirs = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=2))
    ours = PlainMobileNetV2(2)
    ours.load_state_dict(theirs.state_dict())
    images = torch.rand(4, 3, 64, 64)

    for module in (ours, theirs):
        module.train()
        module.dropout.p = 0.0
    torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-4, rtol=1e-4)
    for name, buffer in theirs.named_buffers():  # the momentum and the epsilon of its batch norms
        torch.testing.assert_close(ours.get_buffer(name), buffer)


def test_tensorflow_pads_more_on_the_right():
    assert same_padding(224, 112, 3, 2) == (0, 1, 0, 1)
    assert same_padding(7, 7, 3, 1) == (1, 1, 1, 1)
    assert same_padding(7, 8, 3, 2) == (1, 1, 0, 1)
