"""A reward model with TRL's RewardTrainer, on two replicas: python examples/clients/trl_reward.py."""

import transformers
import trl
from datasets import Dataset
from tiny import llama, report, settings, strategy, texts, tokenizer

from lockstep.integrations.transformers import distribute

RewardTrainer = distribute(trl.RewardTrainer)


def preferences(number: int, seed: int) -> Dataset:
    """Of two texts the longer one is better."""
    pairs = zip(texts(number, seed), texts(number, seed + 1), strict=True)
    ordered = [sorted(pair, key=len) for pair in pairs]
    return Dataset.from_dict({"chosen": [longer for _, longer in ordered], "rejected": [short for short, _ in ordered]})


def main() -> None:
    """Trains, and prints the loss and TRL's metrics."""
    on = strategy()
    trainer = RewardTrainer(
        llama(transformers.LlamaForSequenceClassification, num_labels=1),
        trl.RewardConfig(**settings(on), bf16=False),
        train_dataset=preferences(100, seed=0),
        eval_dataset=preferences(20, seed=10),
        processing_class=tokenizer(),
        strategy=on,
    )
    trainer.train()
    report(trainer)


if __name__ == "__main__":
    main()
