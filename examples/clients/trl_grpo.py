"""Completions that a function rewards, with TRL's GRPOTrainer, on two replicas: python examples/clients/trl_grpo.py."""

from typing import Any

import trl
from datasets import Dataset
from tiny import llama, report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

GRPOTrainer = distribute(trl.GRPOTrainer)


def long_words(completions: list[str], **_: Any) -> list[float]:
    """The reward of each completion: the mean length of its words."""
    return [sum(map(len, text.split())) / (1 + len(text.split())) for text in completions]


def main() -> None:
    """Trains, and prints the loss and TRL's metrics."""
    on = strategy()
    config = trl.GRPOConfig(**settings(on), bf16=False, num_generations=2, max_completion_length=8)
    trainer = GRPOTrainer(
        llama(),
        long_words,
        config,
        train_dataset=Dataset.from_dict({"prompt": texts(48)}),
        eval_dataset=Dataset.from_dict({"prompt": texts(10, seed=1)}),
        processing_class=tokenizer(),
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
