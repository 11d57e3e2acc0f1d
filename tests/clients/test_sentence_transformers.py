"""sentence-transformers' trainer on replicas: the model of the loss is the replica's copy."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import sentence_transformers
import torch
import transformers
from datasets import Dataset
from sentence_transformers import cross_encoder
from sentence_transformers.sentence_transformer import losses, modules
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from tests.clients.training import SETTINGS, sentence, tokenizer
from tests.clients.training import compare as compare
from tests.clients.training import own_storage as own_storage
from tests.conftest import MakeStrategy

from lockstep.errors import ConfigError
from lockstep.integrations.transformers import distribute

BASE = sentence_transformers.SentenceTransformerTrainer
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def encoder() -> Any:
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=32, **SIZES, **NO_DROPOUT))
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = modules.Transformer(folder)
    pooling = modules.Pooling(words.get_word_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")


def rows(number: int, *, salt: int = 0, third: bool = False, classes: bool = False) -> Dataset:
    made: list[dict[str, Any]] = []
    for index in range(number):
        row: dict[str, Any] = {"one": sentence(index, salt=salt), "two": sentence(index, salt=salt + 5)}
        if third:
            row["three"] = sentence(index, salt=salt + 6)
        else:
            row["label"] = index % 2 if classes else (index % 5) / 4
        made.append(row)
    return Dataset.from_list(made)


LOSSES = {
    "cosine": (losses.CosineSimilarityLoss, {}),
    "contrastive": (losses.ContrastiveLoss, {"classes": True}),
    "triplet": (losses.TripletLoss, {"third": True}),
    "matryoshka": (
        lambda model: losses.MatryoshkaLoss(model, losses.CosineSimilarityLoss(model), matryoshka_dims=[16, 8]),
        {},
    ),
    "softmax": (lambda model: losses.SoftmaxLoss(model, 16, 2), {"classes": True}),
}


def maker(name: str) -> Any:
    make_loss, kinds = LOSSES[name]

    def make(base: type, args: dict[str, Any], **named: Any) -> Any:
        config = sentence_transformers.SentenceTransformerTrainingArguments(**args, eval_strategy="epoch")
        model = encoder()
        torch.manual_seed(1)
        loss = make_loss(model)
        return base(model, config, rows(12 * 7 + 5, **kinds), rows(19, salt=1, **kinds), loss, **named)

    return make


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("cosine", 2), ("cosine", 3), ("contrastive", 3), ("triplet", 3), ("matryoshka", 2), ("softmax", 3)],
)
def test_it_equals_one_device(compare: Any, name: str, replicas: int) -> None:
    both = compare(maker(name), BASE, replicas=replicas)
    if name == "softmax":  # the loss has weights, which the optimizer trains too
        weights = [run.trainer.loss.classifier.weight for run in (both.ours, both.theirs)]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def scoring(base: type, args: dict[str, Any], **named: Any) -> Any:
    """With an evaluator, which encodes texts outside replicas."""
    trainer = maker("cosine")(base, args, **named)
    texts = rows(19, salt=1)
    trainer.evaluator = EmbeddingSimilarityEvaluator(texts["one"], texts["two"], texts["label"])
    return trainer


def test_an_evaluator_has_the_trained_model(compare: Any) -> None:
    both = compare(scoring, BASE, replicas=3)
    assert "eval_spearman_cosine" in both.ours.logs[-2]


def pair_encoder(base: type, args: dict[str, Any], **named: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=32, num_labels=1, **SIZES, **NO_DROPOUT)
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = cross_encoder.CrossEncoder(folder, device="cpu")
    config = cross_encoder.CrossEncoderTrainingArguments(**args, eval_strategy="epoch")
    loss = cross_encoder.losses.BinaryCrossEntropyLoss(model)
    return base(model, config, rows(12 * 7 + 5), rows(19, salt=1), loss, **named)


def test_the_trainer_of_cross_encoders(compare: Any) -> None:
    compare(pair_encoder, cross_encoder.CrossEncoderTrainer, replicas=3)


def test_a_loss_with_weights_that_are_each_replica_s(compare: Any, own_storage: None) -> None:
    compare(maker("softmax"), BASE, replicas=2)


@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CoSENTLoss", "CachedMultipleNegativesRankingLoss"])
def test_losses_that_compare_rows_are_refused(make_strategy: MakeStrategy, tmp_path: Any, name: str) -> None:
    model = encoder()
    config = sentence_transformers.SentenceTransformerTrainingArguments(**SETTINGS, output_dir=tmp_path)
    trainer = distribute(BASE)(model, config, rows(12), loss=getattr(losses, name)(model), strategy=make_strategy(2))
    with pytest.raises(
        ConfigError, match=r"(MultipleNegativesRankingLoss|CoSENTLoss), which compares the rows.*one replica"
    ):
        trainer.train()
