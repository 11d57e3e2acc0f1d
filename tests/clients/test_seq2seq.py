"""Seq2SeqTrainer on replicas, with texts that the model generates in evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.clients.training import compare as compare
from tests.clients.training import sentence, tokenizer


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def rows(number: int, *, salt: int = 0) -> list[dict[str, Any]]:
    encode = tokenizer()
    return [
        {
            "input_ids": encode(sentence(index, salt=salt))["input_ids"],
            "labels": encode(sentence(index, salt=salt + 3))["input_ids"] + [2],
        }
        for index in range(number)
    ]


def metrics(prediction: Any) -> dict[str, float]:
    """A number that depends on every token that was generated, and its place."""
    tokens, labels = prediction.predictions, prediction.label_ids
    places = 1 + np.arange(tokens.size).reshape(tokens.shape)
    return {"tokens": float((tokens * places).sum()), "labels": float(labels.clip(0).sum())}


def make(base: type, args: dict[str, Any], **named: Any) -> Any:
    more = {"predict_with_generate": True, "generation_max_length": 12, "eval_strategy": "epoch"}
    model = t5()
    return base(
        model,
        transformers.Seq2SeqTrainingArguments(**args, **more),
        transformers.DataCollatorForSeq2Seq(tokenizer(), model=model),
        rows(12 * 7 + 5),
        rows(19, salt=1),
        processing_class=tokenizer(),
        compute_metrics=metrics,
        **named,
    )


@pytest.mark.parametrize("replicas", [2, 3])
def test_it_equals_one_device(compare: Any, replicas: int) -> None:
    both = compare(make, transformers.Seq2SeqTrainer, replicas=replicas)
    assert "eval_tokens" in both.ours.logs[-2]
    texts = [run.trainer.predict(rows(7, salt=2), num_beams=2).predictions for run in (both.ours, both.theirs)]
    np.testing.assert_array_equal(*texts)
