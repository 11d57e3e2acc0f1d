"""A training that is backed up, as a program of its own: what it does follows from its arguments alone.

Run with ``runpy``, which puts ``ARGUMENTS`` into its globals; or imported for ``train``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls

ROWS, BATCH = 22, 5


class Noisy(Dataset):  # type: ignore[type-arg]
    """Rows with noise that is drawn anew each time one is read; without noise nothing is drawn."""

    def __init__(self, noise: float = 0.1) -> None:
        random = torch.Generator().manual_seed(5)
        self.x = torch.randn(ROWS, 3, 4, 4, generator=random).double()
        self.y = torch.randint(3, (ROWS,), generator=random)
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(3, 4, 4).double() * self.noise if self.noise else 0.0
        return self.x[row] + drawn, self.y[row]


class Tell(ls.Callback):
    """Tells a function of every batch; after the batch ``pause_at`` it calls ``pause``."""

    def __init__(self, hear: Any, pause_at: tuple[int, int] | None = None, pause: Any = None) -> None:
        super().__init__()
        self.hear, self.pause_at, self.pause = hear, pause_at, pause
        self.epoch = 0

    def wants_batch_logs(self) -> bool:
        return False

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.hear((self.epoch, batch))
        if (self.epoch, batch) == self.pause_at:
            self.pause()


def train(
    strategy: ls.Strategy | None,
    callbacks: list[ls.Callback],
    *,
    epochs: int = 3,
    accumulate: int = 1,
    steps_per_epoch: int | None = None,
    exact: bool = False,
    stopping: ls.EarlyStopping | None = None,
) -> tuple[ls.Model, ls.History]:
    """Trains a small network with everything that has a state; ``exact`` leaves out what differs between layouts."""
    torch.manual_seed(3)
    norm, dropout = (nn.ReLU(), nn.Identity()) if exact else (nn.BatchNorm2d(4), nn.Dropout(0.3))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm, dropout, nn.Flatten(), nn.Linear(16, 3)).double()
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.AdamW(network.parameters(), 0.01),
            loss=nn.CrossEntropyLoss(reduction="none"),
            metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60),
            accumulate=accumulate,
        )
    stopping = stopping or ls.EarlyStopping("val_loss", patience=50, restore_best_weights=True)
    history = model.fit(
        DataLoader(Noisy(0.0 if exact else 0.1), BATCH, shuffle=True),
        validation_data=DataLoader(Noisy(0.0), ROWS),
        epochs=epochs,
        callbacks=[stopping, *callbacks],
        steps_per_epoch=steps_per_epoch,
        verbose=0,
    )
    return model, history


def main(arguments: dict[str, Any]) -> None:
    """Trains on the CPU's split, tells of every batch, and writes the weights at the end."""
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * arguments["replicas"])
    backup = ls.BackupAndRestore(arguments["folder"], save_freq=arguments["save_freq"], delete_checkpoint=False)
    strategy = ls.MirroredStrategy(seed=1)
    tell = Tell(arguments["tell"].send, arguments.get("pause_at"), arguments["tell"].recv)
    try:
        model, _ = train(strategy, [tell, backup])
    except SystemExit:
        tell.hear("exits")
        tell.pause()
        raise
    model.save_weights(Path(arguments["out"]))
    strategy.close()


if __name__ == "__main__":
    main(ARGUMENTS)  # type: ignore[name-defined]  # noqa: F821
