"""The models in torch alone are as large as transformers' own."""

from __future__ import annotations

import torch
import transformers

from benchmarks.gpu.models import PlainBert, PlainMobileNetV2
from benchmarks.loops import trained_parameters
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import new_bert


def test_bert_tiny_trains_as_many_parameters_as_the_recipe():
    with torch.device("meta"):
        assert trained_parameters(PlainBert(MlmConfig())) == trained_parameters(new_bert(MlmConfig()))


def test_a_layer_of_the_bert_computes_what_transformers_own_does():
    shape = MlmConfig(layers=1, hidden=32, heads=2, feed_forward=64, vocabulary=100, sequence_length=16, dropout=0.0)
    torch.manual_seed(0)
    theirs, ours = new_bert(shape).bert.encoder.layer[0], PlainBert(shape).layers[0]
    attention, projections = theirs.attention, theirs.attention.self
    own = ours.state_dict()
    for kind in ("weight", "bias"):
        parts = [getattr(each, kind) for each in (projections.query, projections.key, projections.value)]
        own[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
        own[f"self_attn.out_proj.{kind}"] = getattr(attention.output.dense, kind)
        own[f"linear1.{kind}"] = getattr(theirs.intermediate.dense, kind)
        own[f"linear2.{kind}"] = getattr(theirs.output.dense, kind)
    ours.load_state_dict(own)
    hidden = torch.randn(3, 16, 32)

    found = theirs(hidden)
    torch.testing.assert_close(ours(hidden), found if isinstance(found, torch.Tensor) else found[0])


def test_mobilenet_has_as_many_parameters_and_statistics_as_transformers_own():
    with torch.device("meta"):
        ours = PlainMobileNetV2(2)
        theirs = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=2))

    assert trained_parameters(ours) == trained_parameters(theirs)
    assert sum(each.numel() for each in ours.buffers()) == sum(each.numel() for each in theirs.buffers())
