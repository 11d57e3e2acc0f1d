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
from sentence_transformers import sparse_encoder as sparse
from sentence_transformers.sentence_transformer import losses, modules
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from tests.clients.training import SETTINGS, sentence, tokenizer
from tests.clients.training import compare as compare
from tests.clients.training import own_storage as own_storage
from tests.conftest import MakeStrategy

import lockstep as ls
from lockstep.errors import ConfigError, UsageError
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


def rows(number: int, *, salt: int = 0, **kinds: bool) -> Dataset:
    """Pairs with a score or a class, triplets (``third``), plain ``pairs``, or ``single`` texts with a class."""
    made: list[dict[str, Any]] = []
    for index in range(number):
        row: dict[str, Any] = {"one": sentence(index, salt=salt)}
        if "single" not in kinds:
            row["two"] = sentence(index, salt=salt + 5)
        if "third" in kinds:
            row["three"] = sentence(index, salt=salt + 6)
        elif "pairs" not in kinds:
            row["label"] = index % 3 if "single" in kinds else index % 2 if "classes" in kinds else (index % 5) / 4
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
ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
COMPARING = {
    "ranking": (losses.MultipleNegativesRankingLoss, {"pairs": True}),
    "ranking with hard negatives": (losses.MultipleNegativesRankingLoss, {"third": True}),
    "ranking of graded negatives": (
        lambda model: losses.MultipleNegativesRankingLoss(
            model, hardness_mode="hard_negatives", hardness_strength=5.0, gather_across_devices=True
        ),
        {"third": True},
    ),
    "ranking in every direction": (
        lambda model: losses.MultipleNegativesRankingLoss(model, directions=ALL_DIRECTIONS),
        {"pairs": True},
    ),
    "symmetric ranking": (losses.MultipleNegativesSymmetricRankingLoss, {"pairs": True}),
    "CoSENT": (losses.CoSENTLoss, {}),
    "AnglE": (losses.AnglELoss, {}),
    "hard triplets": (losses.BatchHardTripletLoss, {"single": True}),
    "hard triplets, soft margin": (losses.BatchHardSoftMarginTripletLoss, {"single": True}),
    "semi-hard triplets": (losses.BatchSemiHardTripletLoss, {"single": True}),
    "all triplets": (losses.BatchAllTripletLoss, {"single": True}),
    "online contrastive": (losses.OnlineContrastiveLoss, {"classes": True}),
    "a sum of contrastive losses": (
        lambda model: losses.ContrastiveLoss(model, size_average=False),
        {"classes": True},
    ),
    "orthogonal": (losses.GlobalOrthogonalRegularizationLoss, {"pairs": True}),
    "matryoshka of ranking": (
        lambda model: losses.MatryoshkaLoss(
            model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[16, 8], matryoshka_weights=[1.0, 0.5]
        ),
        {"pairs": True},
    ),
    "layers of ranking": (  # beside it a mean over rows, of the layers' distance
        lambda model: losses.AdaptiveLayerLoss(model, losses.MultipleNegativesRankingLoss(model), n_layers_per_step=-1),
        {"pairs": True},
    ),
}
LOSSES |= COMPARING


def maker(name: str, **settings: Any) -> Any:
    make_loss, kinds = LOSSES[name]

    def make(base: type, args: dict[str, Any], **named: Any) -> Any:
        args |= settings
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


@pytest.mark.filterwarnings("error:.*replicas.*")
@pytest.mark.parametrize(("name", "replicas"), [(name, 2 + place % 2) for place, name in enumerate(COMPARING)])
def test_a_loss_that_compares_rows_is_that_of_the_whole_batch(compare: Any, name: str, replicas: int) -> None:
    compare(maker(name), BASE, replicas=replicas)


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


def sparse_encoder(base: type, args: dict[str, Any], **named: Any) -> Any:
    """A callback of its trainer raises the weights of the regularizers, which are means over rows, squared."""
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **SIZES, **NO_DROPOUT))
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = modules.Transformer(folder, transformer_task="fill-mask")
    model = sparse.SparseEncoder(modules=[words, sparse.modules.SpladePooling("max")], device="cpu")
    ranking = sparse.losses.SparseMultipleNegativesRankingLoss(model)
    weights = {"document_regularizer_weight": 6.0, "query_regularizer_weight": 4.0}
    loss = sparse.losses.SpladeLoss(model, ranking, **weights)
    config = sparse.SparseEncoderTrainingArguments(**args, eval_strategy="epoch")
    return base(model, config, rows(89, pairs=True), rows(19, salt=1, pairs=True), loss, **named)


@pytest.mark.filterwarnings("error:.*replicas.*")
def test_the_trainer_of_sparse_encoders(compare: Any) -> None:
    compare(sparse_encoder, sparse.SparseEncoderTrainer, replicas=3)


def test_a_loss_with_weights_that_are_each_replica_s(compare: Any, own_storage: None) -> None:
    compare(maker("softmax"), BASE, replicas=2)


@pytest.mark.parametrize("name", ["ranking", "CoSENT", "layers of ranking"])
def test_replicas_without_rows_take_part(compare: Any, name: str) -> None:
    """The first batches have 3 rows for 4 replicas; the last has 1, which has nothing to be compared with."""
    kinds = LOSSES[name][1]

    def make(base: type, args: dict[str, Any], **named: Any) -> Any:
        sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
        if base is BASE:
            sizes = dict.fromkeys(sizes, 4)
        config = sentence_transformers.SentenceTransformerTrainingArguments(**args | sizes, eval_strategy="epoch")
        model = encoder()
        few = [rows(number, salt=number, **kinds) for number in (3, 2, 1, 4, 3)]
        named |= {"train_dataset": dict(zip("abcde", few, strict=True)), "eval_dataset": rows(6, salt=7, **kinds)}
        return base(model, config, loss=LOSSES[name][0](model), **named)

    compare(make, BASE, replicas=4, steps=5)


@pytest.mark.filterwarnings("error:.*replicas.*")
def test_replicas_with_weights_of_their_own_compare_rows(compare: Any, own_storage: None) -> None:
    compare(maker("ranking"), BASE, replicas=3)


def test_layers_that_are_computed_again_in_the_backward_pass(compare: Any) -> None:
    compare(maker("ranking", gradient_checkpointing=True), BASE, replicas=2)


def test_a_loss_is_the_user_s_again_after_a_training(compare: Any) -> None:
    loss = compare(maker("ranking of graded negatives"), BASE, replicas=2).ours.trainer.loss
    assert "compute_loss_from_embeddings" not in vars(loss)
    assert loss.gather_across_devices


@pytest.mark.parametrize(
    ("make_loss", "advice"),
    [
        (losses.CachedMultipleNegativesRankingLoss, "choose MultipleNegativesRankingLoss, with gradient_checkpointing"),
        (lambda model: losses.GISTEmbedLoss(model, encoder()), "choose MultipleNegativesRankingLoss, or"),
        (losses.MegaBatchMarginLoss, "choose BatchHardTripletLoss or"),
        (
            lambda model: losses.Matryoshka2dLoss(
                model, losses.MultipleNegativesRankingLoss(model), [16, 8], n_layers_per_step=1, n_dims_per_step=-1
            ),
            "n_layers_per_step=-1",
        ),
    ],
)
def test_losses_that_cannot_be_gathered_are_refused(
    make_strategy: MakeStrategy, tmp_path: Any, make_loss: Any, advice: str
) -> None:
    model = encoder()
    config = sentence_transformers.SentenceTransformerTrainingArguments(**SETTINGS, output_dir=tmp_path)
    trainer = distribute(BASE)(model, config, rows(12, pairs=True), loss=make_loss(model), strategy=make_strategy(2))
    with pytest.raises(ConfigError, match=f"{advice}.* one replica"):
        trainer.train()


class GathersItself(losses.MultipleNegativesRankingLoss):
    """As in a loop of one's own; around it the Trainer would gather what has been gathered."""

    def forward(self, sentence_features: Any, labels: Any) -> Any:
        embeddings = [self.model(column)["sentence_embedding"] for column in sentence_features]
        return self.compute_loss_from_embeddings(ls.gather_rows(embeddings), labels)


def test_rows_are_not_gathered_twice(make_strategy: MakeStrategy, tmp_path: Any) -> None:
    model = encoder()
    config = sentence_transformers.SentenceTransformerTrainingArguments(**SETTINGS, output_dir=tmp_path)
    pairs = rows(16, pairs=True)
    trainer = distribute(BASE)(model, config, pairs, loss=GathersItself(model), strategy=make_strategy(2))
    with pytest.raises(UsageError, match="16 rows in a replica whose shard has 8; give it those of the shard"):
        trainer.train()
