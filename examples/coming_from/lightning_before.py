"""Digits with Lightning, in two processes: validation, accumulated and clipped gradients, a falling learning rate.

python examples/coming_from/lightning_before.py
"""

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


class Classifier(lightning.LightningModule):
    """Two layers, with their training."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of this process's batch."""
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self.network(pixels), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Counts what is right."""
        pixels, labels = batch
        self.accuracy(self.network(pixels), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, whose learning rate falls with each update."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        updates = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    """Trains, and saves the weights."""
    lightning.seed_everything(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(pixels[:1536], labels[:1536]), BATCH_SIZE // 2, shuffle=True)
    valid = DataLoader(TensorDataset(pixels[1536:1792], labels[1536:1792]), BATCH_SIZE // 2)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, valid)
    if trainer.is_global_zero:
        print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
        torch.save(model.network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
