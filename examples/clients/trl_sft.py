"""Supervised fine-tuning with TRL's SFTTrainer, on two replicas: python examples/clients/trl_sft.py."""

import trl
from datasets import Dataset
from tiny import llama, report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

SFTTrainer = distribute(trl.SFTTrainer)


def main() -> None:
    """Trains, and prints the loss and TRL's metrics."""
    on = strategy()
    trainer = SFTTrainer(
        llama(),
        trl.SFTConfig(**settings(on), bf16=False),
        train_dataset=Dataset.from_dict({"text": texts(100)}),
        eval_dataset=Dataset.from_dict({"text": texts(20, seed=1)}),
        processing_class=tokenizer(),
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
