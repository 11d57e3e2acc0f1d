"""A script for Lightning that imports nothing of Lockstep.

Two processes, each with half of every batch; Lightning uses the processes of the launcher:

  lockstep run --workers 2 examples/unchanged/lightning_fit.py
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64  # images per step, over all processes


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Mean loss over this process's part of a batch."""
        pixels, labels = batch
        return nn.functional.cross_entropy(self.layers(pixels), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def digits() -> TensorDataset:
    """scikit-learn's 1,797 handwritten digits."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def main(output: str) -> None:
    """Trains, and saves the model."""
    lightning.seed_everything(0)
    processes, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=here,
        num_nodes=processes // here,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        default_root_dir=output,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(digits(), BATCH // processes, shuffle=True, drop_last=True))
    trainer.save_checkpoint(Path(output) / "model.ckpt", weights_only=True)
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    where = f"process {trainer.global_rank} of {trainer.world_size}"
    print(f"{where}: the weights add up to {weights}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["runs/unchanged-lightning"])
