"""The loss that a module computes itself, on several replicas and uneven batches, beside one device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from tests.oracle import train
from tests.train import conftest
from tests.train.conftest import MakeStrategy
from tests.train.test_label_shift import TOKENS, VOCABULARY, bert, gpt2, t5, tokens_and_labels
from torch import Tensor, nn
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, MixtralConfig
from transformers import MixtralForCausalLM as Mixtral

import lockstep as ls
from lockstep.errors import ConfigError, DataError
from lockstep.train.model import Model

Batch = dict[str, Tensor]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
DROPOUTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier() -> nn.Module:
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **SIZES, **DROPOUTS))


def reader() -> nn.Module:
    return BertForQuestionAnswering(BertConfig(vocab_size=VOCABULARY, **SIZES, **DROPOUTS))


def mixture() -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY, **SIZES, num_key_value_heads=1, num_local_experts=2, output_router_logits=True
    )
    return Mixtral(config)


class WeightedLabels(nn.Module):
    """Weighs classes, so that its mean is over weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        self.loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.embedding(input_ids)
        return {"loss": self.loss(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def texts() -> list[Batch]:
    """Batches of 6, 6 and 1 rows whose numbers of labels differ from row to row."""
    ids, labels = tokens_and_labels(ignored=True)
    labels[1, 1:] = -100
    masked = {"input_ids": ids, "labels": labels}
    return [
        masked,
        {"input_ids": ids.flip(0), "labels": ids.flip(0)},
        {name: each[:1] for name, each in masked.items()},
    ]


def classified() -> list[Batch]:
    return [{"input_ids": batch["input_ids"], "labels": batch["input_ids"][:, 0] % 3} for batch in texts()]


def answers() -> list[Batch]:
    ids, _ = tokens_and_labels(ignored=False)
    batch = {"input_ids": ids, "start_positions": ids[:, 0] % TOKENS, "end_positions": ids[:, 1] % TOKENS}
    return [batch, {name: each[:4] for name, each in batch.items()}]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def labels_of(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def following_labels_of(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def weights_of(batch: Batch) -> float:
    weights = torch.linspace(0.1, 2, VOCABULARY)
    return float(weights[batch["labels"][batch["labels"] != -100]].sum())


def rows_of(batch: Batch) -> int:
    return len(batch["input_ids"])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]], Callable[[Batch], float]]] = {
    "causal language model": (gpt2, texts, following_labels_of),
    "token classification": (bert, texts, labels_of),
    "sequence to sequence": (t5, texts, labels_of),
    "classes": (classifier, classified, rows_of),
    "weights of classes": (WeightedLabels, texts, weights_of),
}


def trained_by_hand(module: nn.Module, batches: list[Batch], count: Callable[[Batch], float]) -> float:
    """One epoch on one device. Returns its mean loss."""
    rows = [(batch, count(batch)) for batch in batches]
    return train(module.train(), rows, sgd, lambda outputs, count: (outputs["loss"] * count, count)).epoch_losses(1)[0]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5)


def compiled(strategy: ls.MirroredStrategy, module: nn.Module, loss: Any = None, **settings: Any) -> Model:
    return conftest.compiled(module, strategy, sgd, loss, **settings)


def assert_close(model: Model, module: nn.Module) -> None:
    oracle.assert_close(dict(model.state_dict()), module, 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_on_one_device(make_strategy: MakeStrategy, case: str):
    make, data, count = CASES[case]
    module, plain = seeded(make), seeded(make)
    expected = trained_by_hand(plain, data(), count)
    model = compiled(make_strategy(3), module)
    history = model.fit(data(), validation_data=data(), verbose=0)
    assert history.history["loss"] == pytest.approx([expected], abs=1e-5)
    assert_close(model, plain)
    assert history.history["val_loss"] == [model.evaluate(data(), verbose=0)["loss"]]


def test_a_sum_of_means_over_rows_is_one_too(make_strategy: MakeStrategy):
    module, plain = seeded(reader), seeded(reader)
    expected = trained_by_hand(plain, answers(), rows_of)
    model = compiled(make_strategy(3), module)
    history = model.fit([(batch, batch["start_positions"]) for batch in answers()], verbose=0)
    assert history.history["loss"] == pytest.approx([expected], abs=1e-5)
    assert_close(model, plain)


def test_a_loss_that_shards_do_not_add_up_to_is_refused_with_what_to_write(make_strategy: MakeStrategy):
    model = compiled(make_strategy(2), seeded(mixture))
    before = copy.deepcopy(model.module.state_dict())
    with pytest.raises(ConfigError, match=r"loss that MixtralForCausalLM computes.*give compile a loss\(outputs"):
        model.fit(texts(), verbose=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    compiled(make_strategy(1), seeded(mixture)).fit(texts(), verbose=0)  # one replica is one device


def test_metrics_beside_it_compare_what_it_compares(make_strategy: MakeStrategy):
    module = seeded(gpt2).eval()
    batch = texts()[0]
    names = ["perplexity", "accuracy", "shifted_accuracy"]
    model = compiled(make_strategy(3), module, metrics=names)

    logs = model.evaluate(texts()[:1], verbose=0)

    with torch.no_grad():
        outputs = module(**batch)
    labels = batch["labels"][:, 1:]
    met = (outputs.logits[:, :-1].argmax(-1) == labels)[labels != -100].float().mean().item()
    assert logs["loss"] == pytest.approx(outputs.loss.item(), abs=1e-6)
    assert logs["perplexity"] == pytest.approx(math.exp(outputs.loss.item()), rel=1e-5)
    assert [logs[name] for name in names[1:]] == pytest.approx([met, met])


def test_shifted_accuracy_shifts_beside_any_loss(make_strategy: MakeStrategy):
    module, batch = seeded(gpt2).eval(), texts()[0]

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    model = compiled(make_strategy(2), module, loss=loss, metrics=["shifted_accuracy"])
    logs = model.evaluate([({"input_ids": batch["input_ids"]}, batch["labels"])], verbose=0)
    with torch.no_grad():
        logits, labels = module(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    assert logs["shifted_accuracy"] == pytest.approx(
        (logits.argmax(-1) == labels)[labels != -100].float().mean().item()
    )


def test_arrays_with_labels_need_no_y(make_strategy: MakeStrategy):
    module, plain = seeded(gpt2), seeded(gpt2)
    x = texts()[0]
    trained_by_hand(plain, [{name: each[rows] for name, each in x.items()} for rows in (slice(4), slice(4, 6))], len)
    model = compiled(make_strategy(2), module)
    history = model.fit(x, batch_size=4, shuffle=False, validation_data=x, verbose=0).history
    assert_close(model, plain)
    expected = pytest.approx(plain.eval()(**x).loss.item(), abs=1e-5)
    assert [history["val_loss"][0], model.evaluate(x, verbose=0)["loss"], model.test_on_batch(x)["loss"]] == [
        expected
    ] * 3
    assert model.train_on_batch(x)["loss"] == expected
    with pytest.raises(ConfigError, match="leave these out of x"):
        model.predict(x)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_replica_that_runs_without_rows_adds_nothing(make_strategy: MakeStrategy):
    batch = {"x": torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), "labels": torch.tensor([0, 2])}
    module, plain = seeded(Normalized), seeded(Normalized)
    expected = trained_by_hand(plain, [batch], lambda batch: 2)
    with make_strategy(3).scope():
        model = Model(module, sync_batchnorm=True)
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5))
    assert model.fit([batch], verbose=0).history["loss"] == pytest.approx([expected], abs=1e-5)
    assert_close(model, plain)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.layer(x))


def test_what_cannot_work_says_what_to_give(make_strategy: MakeStrategy):
    x = {"x": torch.zeros(4, 2), "labels": torch.zeros(4)}
    with pytest.raises(ConfigError, match="the outputs of Silent have none"):
        compiled(make_strategy(2), Silent()).fit([x], verbose=0)
    with pytest.raises(DataError, match="such dicts with 'labels'"):
        compiled(make_strategy(2), Silent()).fit([{"x": x["x"]}], verbose=0)
    with pytest.raises(DataError, match="cannot be weighted any more"):
        compiled(make_strategy(2), Silent()).fit([(x, x["labels"], torch.ones(4))], verbose=0)
    with pytest.raises(ConfigError, match=r"with compile_module the calls.*cannot be traced"):
        compiled(make_strategy(2), Silent(), compile_module=True)
