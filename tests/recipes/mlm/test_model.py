from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM

from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import NO_POSITION, MaskedLanguageModel, new_bert

SMALL = MlmConfig(layers=2, hidden=16, heads=2, feed_forward=32, vocabulary=60, sequence_length=24)
POSITIONS = torch.tensor([[1, 4, NO_POSITION], [2, NO_POSITION, NO_POSITION], [3, 5, 7]])


def inputs() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(60, (3, 8), generator=torch.Generator().manual_seed(0))
    return tokens, (torch.arange(8) < torch.tensor([[6], [4], [8]])).long()


@pytest.fixture
def model() -> MaskedLanguageModel:
    torch.manual_seed(0)
    return new_bert(SMALL).eval()


def test_bert_tiny_has_the_published_number_of_parameters():
    model = new_bert(MlmConfig())
    assert sum(parameter.numel() for parameter in model.bert.parameters()) == 4_385_920


def test_only_the_pooler_is_frozen(model: MaskedLanguageModel):
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]


def test_logits_are_those_of_transformers_at_the_masked_positions(model: MaskedLanguageModel):
    tokens, attention_mask = inputs()
    theirs = BertForMaskedLM(model.bert.config).eval()
    unused = theirs.load_state_dict(model.state_dict(), strict=False)

    logits = model(tokens, attention_mask, POSITIONS)
    everywhere = theirs(input_ids=tokens, attention_mask=attention_mask).logits

    assert unused.missing_keys == []
    assert unused.unexpected_keys == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    expected = torch.stack([everywhere[0, 1], everywhere[0, 4], everywhere[1, 2], *everywhere[2, [3, 5, 7]]])
    torch.testing.assert_close(logits, expected)


def test_a_static_model_gives_every_slot_logits_and_looks_at_no_input(model: MaskedLanguageModel):
    tokens, attention_mask = inputs()
    packed = model(tokens, attention_mask, POSITIONS)
    model.static_shapes = True
    with HostSyncs() as reads:
        every = model(tokens, attention_mask, POSITIONS)
    assert every.shape == (3, 3, 60)
    torch.testing.assert_close(every[POSITIONS != NO_POSITION], packed)
    assert reads.syncs == []


def test_without_positions_it_is_asked_about_every_token(model: MaskedLanguageModel):
    tokens, attention_mask = inputs()
    everywhere = model(tokens, attention_mask)
    handed = model(inputs_embeds=model.bert.embeddings.word_embeddings(tokens), attention_mask=attention_mask)
    assert everywhere.shape == (3, 8, 60)
    torch.testing.assert_close(everywhere[0, 1], model(tokens, attention_mask, POSITIONS)[0])
    torch.testing.assert_close(handed, everywhere)


def test_the_vocabulary_projection_sees_masked_tokens_only(model: MaskedLanguageModel):
    seen: list[torch.Size] = []
    decoder = model.cls["predictions"].decoder
    decoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model(*inputs(), POSITIONS)
    assert seen == [torch.Size([6, 16])]


def test_word_embeddings_and_projection_are_one_weight_also_in_a_copy(model: MaskedLanguageModel):
    for each in (model, copy.deepcopy(model)):
        assert each.cls["predictions"].decoder.weight is each.bert.embeddings.word_embeddings.weight
        assert each.cls["predictions"].decoder.bias is each.cls["predictions"].bias


def test_an_empty_shard_gives_no_logits_and_zero_gradients(model: MaskedLanguageModel):
    empty = torch.zeros(0, 8, dtype=torch.int64)
    logits = model(empty, empty, torch.zeros(0, 3, dtype=torch.int64))
    logits.sum().backward()
    assert logits.shape == (0, 60)
    gradient = model.bert.embeddings.word_embeddings.weight.grad
    assert gradient is not None
    assert not gradient.any()


def test_rows_without_masked_tokens_give_no_logits(model: MaskedLanguageModel):
    assert model(*inputs(), torch.zeros(3, 0, dtype=torch.int64)).shape == (0, 60)


def test_dropout_is_as_asked_for():
    model = new_bert(replace(SMALL, dropout=0.25))
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.25}
