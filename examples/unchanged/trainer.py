"""A script for the transformers Trainer that imports nothing of Lockstep.

Two processes, each with half of every batch:

  lockstep run --workers 2 examples/unchanged/trainer.py
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

BATCH = 64  # images per step, over all processes


class Classifier(nn.Module):
    """Two layers. Returns the loss with the logits, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean loss and logits [rows, 10] of images [rows, 64]."""
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits() -> list[dict[str, Tensor]]:
    """scikit-learn's 1,797 handwritten digits."""
    data = load_digits()
    pixels, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return [{"pixels": pixels[index], "labels": labels[index]} for index in range(len(labels))]


def main(output: str) -> None:
    """Trains, and saves the model."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=output,
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=2,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(Classifier(), args, train_dataset=digits())
    trainer.train()
    trainer.save_model(output)
    weights = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"process {args.process_index} of {args.world_size}: the weights add up to {weights}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["runs/unchanged-trainer"])
