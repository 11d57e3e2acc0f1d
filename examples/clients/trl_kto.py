"""Good and bad answers with TRL's KTOTrainer, on two replicas: python examples/clients/trl_kto.py."""

import trl
from datasets import Dataset
from tiny import llama, report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

KTOTrainer = distribute(trl.KTOTrainer)


def answers(number: int, seed: int) -> Dataset:
    """An answer with a bird in it is good."""
    completions = texts(number, seed + 1)
    return Dataset.from_dict(
        {
            "prompt": texts(number, seed),
            "completion": [f" {text}" for text in completions],
            "label": ["bird" in text for text in completions],
        }
    )


def main() -> None:
    """Trains, and prints the loss and TRL's metrics."""
    on = strategy()
    trainer = KTOTrainer(
        llama(),
        llama(),
        trl.KTOConfig(**settings(on), bf16=False),
        train_dataset=answers(100, seed=0),
        eval_dataset=answers(20, seed=10),
        processing_class=tokenizer(),
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
