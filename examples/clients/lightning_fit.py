"""Lightning on all replicas of one process: the module, the callbacks and the loggers stay as they are.

python examples/clients/lightning_fit.py
"""

import sys
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lockstep.integrations.lightning import LockstepStrategy

BATCH = 64  # images per step, over all replicas


class Classifier(lightning.LightningModule):
    """Two layers, with their training; nothing of Lockstep."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.f1 = MulticlassF1Score(10, average="macro")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Mean loss of a batch."""
        pixels, labels = batch
        logits = self.network(pixels)
        loss = cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("f1", self.f1(logits, labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Loss and accuracy of a batch."""
        pixels, labels = batch
        logits = self.network(pixels)
        self.accuracy(logits, labels)
        self.log_dict({"val_loss": cross_entropy(logits, labels), "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> Any:
        """SGD with a learning rate that falls with each update."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(strategy: Any) -> Classifier:
    """Trains for two epochs, of which the last batch is not full."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(
        module,
        DataLoader(TensorDataset(pixels[:1500], labels[:1500]), BATCH, shuffle=True),
        DataLoader(TensorDataset(pixels[1500:], labels[1500:]), BATCH),
    )
    print(", ".join(f"{name} {float(value):.4f}" for name, value in sorted(trainer.callback_metrics.items())))
    return module


if __name__ == "__main__":
    replicas = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    train(LockstepStrategy(replicas=replicas))  # "auto" is Lightning's own, with the same numbers
