"""Digits with Lightning, in two processes, with accumulated gradients.

python examples/coming_from/lightning_before.py
"""

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
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
        loss = cross_entropy(self.network(pixels), labels)
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
        scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    """Trains, and saves the weights."""
    lightning.seed_everything(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1536], labels[:1536])
    train = DataLoader(data, BATCH_SIZE // 2, shuffle=True)
    data = TensorDataset(pixels[1536:1792], labels[1536:1792])
    valid = DataLoader(data, BATCH_SIZE // 2)
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
    )
    trainer.fit(model, train, valid)
    if trainer.is_global_zero:
        last = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"loss {last['loss']:.4f}, val_accuracy {last['val_accuracy']:.4f}")
        torch.save(model.network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
