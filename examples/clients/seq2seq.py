"""A T5 with evaluations that generate texts, on two replicas: python examples/clients/seq2seq.py."""

from typing import Any

import transformers
from tiny import report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

Seq2SeqTrainer = distribute(transformers.Seq2SeqTrainer)


def t5() -> Any:
    """A T5 of 9,000 weights."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special, dropout_rate=0.0))


def pairs(number: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Tokens of texts, and those of their words backwards."""
    tokens = [tokenizer()(text)["input_ids"] for text in texts(number, seed)]
    return [{"input_ids": row, "labels": [*row[::-1], 2]} for row in tokens]


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of generated tokens that are right."""
    labels = prediction.label_ids
    return {"accuracy": float((prediction.predictions[:, 1:] == labels[:, :-1])[labels[:, :-1] > 0].mean())}


def main() -> None:
    """Trains, and prints the loss and the accuracy."""
    on, model = strategy(), t5()
    trainer = Seq2SeqTrainer(
        model,
        transformers.Seq2SeqTrainingArguments(**settings(on), predict_with_generate=True, generation_max_length=10),
        transformers.DataCollatorForSeq2Seq(tokenizer(), model=model),
        pairs(100),
        pairs(20, seed=1),
        processing_class=tokenizer(),
        compute_metrics=accuracy,
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
