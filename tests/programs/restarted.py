"""A program that is restarted: trains with a backup, and kills itself where it is told to, once.

python restarted.py FOLDER [STEP:WORKER ...]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep as ls

LOST_AFTER_S = 3.0


class Death(ls.Callback):
    """Kills the process of a worker after a batch, unless it has done so before."""

    def __init__(self, folder: Path, deaths: list[str]) -> None:
        super().__init__()
        self.folder, self.deaths = folder, deaths

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        death = f"{self.model.training_state.position.step}:{self.model.strategy.workers.index}"
        mark = self.folder / f"died {death}"
        if death in self.deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, deaths = Path(sys.argv[1]), sys.argv[2:]
    strategy = ls.MultiWorkerMirroredStrategy(
        ["cpu:0"], seed=0, timeout_s=60.0, communication=ls.CommunicationOptions(lost_after_s=LOST_AFTER_S)
    )
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 48).reshape(12, 4), torch.linspace(0, 1, 12)[:, None])
    with strategy.scope():
        model = ls.Model(network)
        model.compile(torch.optim.Adam(network.parameters(), 0.01), loss=nn.MSELoss(reduction="none"))
    model.fit(
        torch.utils.data.DataLoader(data, batch_size=5, shuffle=True),
        epochs=3,
        verbose=0,
        callbacks=[Death(folder, deaths), ls.BackupAndRestore(folder / "backup", save_freq=1)],
    )
    model.save_weights(folder / "weights.safetensors")
    strategy.close()


if __name__ == "__main__":
    main()
