"""Embeddings with SentenceTransformerTrainer, on two replicas: python examples/clients/sentence_embeddings.py."""

import tempfile
from typing import Any

import sentence_transformers
import transformers
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses, modules
from tiny import report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

SentenceTransformerTrainer = distribute(sentence_transformers.SentenceTransformerTrainer)


def encoder() -> Any:
    """A BERT of 8,000 weights; sentence_transformers.SentenceTransformer("name") loads one."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, **no_dropout, intermediate_size=32))
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = modules.Transformer(folder)
    return sentence_transformers.SentenceTransformer(modules=[words, modules.Pooling(16)], device="cpu")


def pairs(number: int, seed: int = 0) -> Dataset:
    """A text, and the same without its first word. Those of the other rows in a batch are the negatives."""
    whole = texts(number, seed)
    return Dataset.from_dict({"anchor": whole, "positive": [text.split(" ", 1)[1] for text in whole]})


def main() -> None:
    """Trains, and prints the loss."""
    on, model = strategy(), encoder()
    trainer = SentenceTransformerTrainer(
        model,
        sentence_transformers.SentenceTransformerTrainingArguments(**settings(on)),
        train_dataset=pairs(100),
        eval_dataset=pairs(20, seed=10),
        loss=losses.MultipleNegativesRankingLoss(model),  # 11 negatives a row on any number of replicas
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
