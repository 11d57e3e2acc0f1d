from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, MissingExtraError
from lockstep_tools.recipes.memory import Lora, add_lora, trained_parameters

WIDTH, LAYERS = 16, 2


def adapted(model: nn.Module) -> set[str]:
    return {
        name.rpartition(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=8", Lora(r=8)),
        ("r=4,alpha=16", Lora(r=4, alpha=16)),
        (
            "targets = query + value , dropout=0.05,r=2",
            Lora(r=2, dropout=0.05, targets=("query", "value")),
        ),
        ("targets=all-linear", Lora(targets=("all-linear",))),
    ],
)
def test_parse_reads_what_is_given_and_leaves_the_rest(text: str, expected: Lora):
    assert Lora.parse(text) == expected


@pytest.mark.parametrize(("lora", "alpha"), [(Lora(r=4), 8), (Lora(r=4, alpha=1), 1)])
def test_alpha_is_twice_r_unless_given(bert: Any, lora: Lora, alpha: int):
    assert add_lora(bert, lora).peft_config["default"].lora_alpha == alpha


@pytest.mark.parametrize("text", ["", "8", "r=8,", "r=", "rank=8", "r=8.5", "alpha=much", "dropout=some"])
def test_what_cannot_be_parsed_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=f"^lora='{text}' was given, expected some of r, alpha, dropout, targets as"):
        Lora.parse(text)


@pytest.mark.parametrize("text", ["r=0", "alpha=-1", "dropout=1", "targets=query+all-linear"])
def test_a_bad_value_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"^lora .* was given"):
        Lora.parse(text)


def test_adapters_are_trained_and_the_rest_is_frozen(bert: Any):
    before = {name: value.clone() for name, value in bert.state_dict().items()}
    model = add_lora(bert, Lora(r=4), task="SEQ_CLS")

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapted(model) == {"query", "value"}  # peft's choice for BERT
    assert all("lora_" in name or "classifier" in name for name in trained)
    head = 2 * WIDTH + 2
    assert trained_parameters(model) == LAYERS * 2 * (4 * WIDTH + WIDTH * 4) + head

    plain = model.unload().state_dict()
    assert plain.keys() == before.keys()
    assert all(torch.equal(plain[name], value) for name, value in before.items())


def test_the_settings_reach_peft(bert: Any):
    lora = Lora(r=3, alpha=12, dropout=0.25, targets=("key",))
    model = add_lora(bert, lora)

    layer = model.base_model.model.bert.encoder.layer[0].attention.self.key
    assert layer.scaling["default"] == 12 / 3
    assert layer.lora_dropout["default"].p == 0.25
    assert layer.lora_A["default"].weight.shape == (3, WIDTH)
    assert adapted(model) == {"key"}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trained)


def test_all_linear_is_every_layer_but_the_head(bert: Any):
    model = add_lora(bert, Lora(targets=("all-linear",)), task="SEQ_CLS")
    assert adapted(model) == {"query", "key", "value", "dense"}


def test_adapters_beside_bf16_weights_are_float32(bert: Any):
    model = add_lora(bert.to(torch.bfloat16), Lora(r=2), task="SEQ_CLS")
    kinds = {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}
    assert kinds == {torch.float32}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            Lora(targets=("query", "quary")),
            "no layer 'quary' for lora in BertForSequenceClassification; its linear layers: query, key.*",
        ),
        (
            Lora(targets=("dropout",)),
            r"lora cannot be added \(Target module Dropout.* to BertForSequence.*",
        ),
    ],
)
def test_a_layer_that_is_not_there_is_named_before_anything_is_changed(bert: Any, lora: Lora, message: str):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        add_lora(bert, lora, task="SEQ_CLS")
    assert not adapted(bert)
    assert all(parameter.requires_grad for parameter in bert.parameters())


def test_a_kind_that_peft_does_not_know_needs_targets():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    message = r"^lora cannot be added \(.*\) to Sequential; its linear layers: 0, 2; give some of them as targets"
    with pytest.raises(ConfigError, match=message):
        add_lora(model, Lora())
    assert adapted(add_lora(model, Lora(targets=("0",)))) == {"0"}


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"^the package 'peft' is not installed; .*'torch-lockstep\[text\]'$"):
        add_lora(nn.Linear(2, 2), Lora(targets=("0",)))


def test_a_head_that_is_trained_in_full_is_float32_between_bf16_weights(bert: Any):
    model = add_lora(bert.to(torch.bfloat16), Lora(r=2), task="SEQ_CLS")
    logits = model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits
    logits.sum().backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("classifier" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert all(parameter.grad is not None for parameter in trained.values())
    assert logits.dtype == torch.float32
