from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.recipes.reviews.conftest import MakeConfig
from transformers import BertConfig, BertForSequenceClassification

from lockstep.errors import ConfigError
from lockstep_tools.recipes.reviews.task import build_collator, build_reviews, class_names


@pytest.fixture
def saved(tiny: MakeConfig, tmp_path: Path) -> Path:
    """A small BERT with its tokenizer, as ``save_pretrained`` leaves them."""
    task = build_reviews(tiny(seed=7))
    task.model.save_pretrained(tmp_path / "bert")
    task.tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_task_has_all_parts_and_a_model_of_the_config(tiny: MakeConfig):
    task = build_reviews(tiny())
    assert [len(part) for part in (task.train, task.valid, task.test)] == [80, 10, 10]
    assert task.names == ("差评！", "好评！")
    assert isinstance(task.model, BertForSequenceClassification)
    assert task.model.config.id2label == {0: "差评！", 1: "好评！"}
    assert task.model.config.vocab_size == len(task.tokenizer) <= 200
    texts = {review.text for review in task.splits.test}
    assert not texts & {review.text for review in task.splits.train}


def test_the_same_config_gives_the_same_weights_whatever_was_drawn_before(tiny: MakeConfig):
    first = build_reviews(tiny()).model.state_dict()
    torch.rand(1)
    second = build_reviews(tiny()).model.state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_batches_are_padded_to_a_multiple_of_eight(tiny: MakeConfig):
    task = build_reviews(tiny())
    batch = build_collator(task)([task.train[n] for n in range(4)])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == (4, 8)
    assert torch.equal(batch["attention_mask"].bool(), batch["input_ids"] != task.tokenizer.pad_token_id)


def test_tokens_are_hidden_in_training_alone(tiny: MakeConfig):
    task = build_reviews(tiny(hide=0.9))
    mask = task.tokenizer.mask_token_id
    assert any(mask in task.train[n]["input_ids"] for n in range(5))
    assert not any(mask in part[n]["input_ids"] for part in (task.valid, task.test) for n in range(10))


def test_a_pretrained_model_brings_its_size_and_tokenizer(tiny: MakeConfig, saved: Path):
    with pytest.warns(UserWarning, match="without effect, .*: vocabulary, layers, hidden, feed_forward, dropout"):
        task = build_reviews(tiny(pretrained=str(saved), seed=1, max_tokens=500))
    theirs = BertForSequenceClassification.from_pretrained(saved)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in task.model.state_dict().items())
    assert max(len(task.train[n]["input_ids"]) for n in range(80)) <= theirs.config.max_position_embeddings


def test_a_pretrained_head_of_other_classes_is_drawn_anew(tiny: MakeConfig, saved: Path, tmp_path: Path):
    three = tmp_path / "three.csv"
    three.write_text("label,review\n" + "".join(f"{n % 3},房间{n}\n" for n in range(30)), encoding="utf-8")
    with pytest.warns(UserWarning, match="without effect"):
        task = build_reviews(tiny(pretrained=str(saved), data=three, names="坏,中,好"))
    assert task.model.config.id2label == {0: "坏", 1: "中", 2: "好"}
    assert task.model.classifier.weight.shape == (3, 16)


def test_lora_trains_few_parameters_and_warns_of_random_weights(tiny: MakeConfig, saved: Path):
    with pytest.warns(UserWarning, match="trains adapters beside frozen weights, which are random"):
        new = build_reviews(tiny(lora="r=2"))
    with pytest.warns(UserWarning, match="without effect"):
        old = build_reviews(tiny(lora="r=2", pretrained=str(saved)))
    for task in (new, old):
        trained = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
        assert all("lora" in name or "classifier" in name for name in trained)


def test_tokens_without_an_embedding_are_refused(tiny: MakeConfig, saved: Path):
    BertForSequenceClassification(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(saved)
    with (
        pytest.warns(UserWarning, match="without effect"),
        pytest.raises(ConfigError, match="has 9 embeddings"),
    ):
        build_reviews(tiny(pretrained=str(saved)))


def test_classes_are_named_as_asked_or_by_their_labels(tiny: MakeConfig):
    assert class_names(tiny(), [0, 1]) == ("差评！", "好评！")
    assert class_names(tiny(), [1, 2, 3]) == ("1", "2", "3")
    assert class_names(tiny(names=" bad , good "), [0, 1]) == ("bad", "good")


@pytest.mark.parametrize("names", ["bad", "bad,good,great", "bad,bad", "bad,"])
def test_names_that_do_not_fit_the_classes_are_refused(tiny: MakeConfig, names: str):
    with pytest.raises(ConfigError, match="for 2 classes; expected as many names"):
        class_names(tiny(names=names), [0, 1])
