"""Lightning's Trainer in one process, for the suite ``steps``: all steps are in one ``fit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from program import start_timer, take_job
from steps_work import make_work, trained_by
from torch import Tensor, nn

from benchmarks.small_steps import fused_adam


class SmallModule(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fused_adam(self)


class Batches:
    """The batches as one data set; a list would be several loaders."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class RecordSteps(Callback):
    """Records every step."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *others: Any) -> None:
        self._timer.record_step(outputs["loss"].item)


def main() -> None:
    """Trains in this process, without logs, bars and files."""
    job = take_job()
    network, batches = make_work(job)
    timer = start_timer(job, trained=trained_by(network))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RecordSteps(timer)],
    )
    trainer.fit(SmallModule(network), train_dataloaders=Batches(batches))


if __name__ == "__main__":
    main()
