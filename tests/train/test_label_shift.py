"""Metrics by name beside the loss that a module of transformers computes: they compare what the loss compares."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from tests.train.conftest import compiled
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import lockstep as ls
from lockstep.train.model import Model

ROWS, TOKENS, VOCABULARY = 6, 8, 17


def loss(outputs: Any, targets: Tensor) -> Tensor:
    own: Tensor = outputs.loss
    return own


def gpt2() -> nn.Module:
    sizes = {"n_positions": TOKENS, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **sizes, **dropouts))


def t5() -> nn.Module:
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes))


def tokens_and_labels(*, ignored: bool) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    if ignored:
        labels[:, -3:] = -100
        labels[0, :4] = -100
    return ids, labels


def accuracy(logits: Tensor, labels: Tensor) -> float:
    counts = labels != -100
    return float((logits.argmax(-1) == labels)[counts].float().mean())


@pytest.fixture
def strategy(make_strategy: MakeStrategy) -> ls.MirroredStrategy:
    return make_strategy(2)


def evaluated(
    strategy: ls.MirroredStrategy, module: nn.Module, x: Any, y: Tensor, loss: Any = loss
) -> dict[str, float]:
    model = compiled(module, strategy, "sgd", loss, metrics=["accuracy", "f1"])
    return model.evaluate([(x, y)], verbose=0)


@pytest.mark.filterwarnings("ignore:the loss 'loss' is taken as a mean")
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(("make", "shifts"), [(gpt2, True), (bert, False), (t5, False)])
def test_accuracy_compares_the_labels_of_the_loss(
    make: Callable[[], nn.Module], shifts: bool, ignored: bool, strategy: ls.MirroredStrategy
):
    torch.manual_seed(0)
    module = make().eval()
    ids, labels = tokens_and_labels(ignored=ignored)
    with torch.no_grad():
        logits = module(input_ids=ids, labels=labels).logits
    # Labels that half of the outputs meet, at the position that the loss compares.
    met = logits.argmax(-1)
    best = torch.where(torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 2 == 0, met, labels)
    y = torch.cat([labels[:, :1], best[:, :-1]], 1) if shifts else best
    y = torch.where(labels == -100, labels, y)

    with torch.no_grad():
        logits = module(input_ids=ids, labels=y).logits
    expected = accuracy(logits[:, :-1], y[:, 1:]) if shifts else accuracy(logits, y)

    logs = evaluated(strategy, module, {"input_ids": ids, "labels": y}, y)

    assert expected > 0.2
    assert logs["accuracy"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:the loss 'loss' is taken as a mean")
def test_targets_that_are_shifted_already_are_compared_as_they_are(strategy: ls.MirroredStrategy):
    torch.manual_seed(0)
    module, (ids, _) = gpt2().eval(), tokens_and_labels(ignored=False)
    with torch.no_grad():
        logits = module(input_ids=ids, labels=ids).logits
    y = F.pad(ids[:, 1:], (0, 1), value=-100)
    logs = evaluated(strategy, module, {"input_ids": ids, "labels": ids}, y)
    assert logs["accuracy"] == pytest.approx(accuracy(logits, y), abs=1e-6)


def test_a_loss_of_torch_compares_what_it_is_given(strategy: ls.MirroredStrategy):
    torch.manual_seed(0)
    module, (ids, _) = gpt2().eval(), tokens_and_labels(ignored=False)
    with torch.no_grad():
        logits = module(input_ids=ids).logits
    logs = evaluated(strategy, module, {"input_ids": ids, "labels": ids}, ids, loss="cross_entropy")
    assert logs["accuracy"] == pytest.approx(accuracy(logits, ids), abs=1e-6)


class Smoothed(nn.Module):
    """Computes a loss that no cross-entropy of the labels is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.embedding(input_ids)
        value = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.5)
        return SimpleNamespace(loss=value, logits=logits)


@pytest.mark.filterwarnings("ignore:the loss 'loss' is taken as a mean")
def test_a_loss_that_cannot_be_told_is_warned_of():
    torch.manual_seed(0)
    ids, _ = tokens_and_labels(ignored=False)
    model = Model(Smoothed())
    model.compile("sgd", loss, metrics=["accuracy"])
    with pytest.warns(UserWarning, match=r"shifts the labels by one token.*cannot be told.*F\.pad\(labels"):
        model.evaluate([({"input_ids": ids, "labels": ids}, ids)], verbose=0)
