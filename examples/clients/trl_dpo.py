"""Preferences with TRL's DPOTrainer and a reference model, on two replicas: python examples/clients/trl_dpo.py."""

import trl
from datasets import Dataset
from tiny import llama, report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

DPOTrainer = distribute(trl.DPOTrainer)


def preferences(number: int, seed: int) -> Dataset:
    """Of two answers to a text the longer one is better."""
    answers = zip(texts(number, seed + 1), texts(number, seed + 2), strict=True)
    ordered = [sorted(pair, key=len) for pair in answers]
    return Dataset.from_dict(
        {
            "prompt": texts(number, seed),
            "chosen": [f" {longer}" for _, longer in ordered],
            "rejected": [f" {shorter}" for shorter, _ in ordered],
        }
    )


def main() -> None:
    """Trains, and prints the loss and TRL's metrics."""
    on = strategy()
    trainer = DPOTrainer(
        llama(),
        llama(),
        trl.DPOConfig(**settings(on), bf16=False),
        train_dataset=preferences(100, seed=0),
        eval_dataset=preferences(20, seed=10),
        processing_class=tokenizer(),
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
