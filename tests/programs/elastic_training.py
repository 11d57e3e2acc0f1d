"""A training of four replicas with dropout and Adam, on as many workers as there are, that says when each step ends.

python elastic_training.py STEPS BACKUP [alone]: the global batches to train, the folder of the backups, of which there
is one every ten batches, and whether to train with a ``MirroredStrategy`` in one process.
"""

import sys
import threading
import time

import torch
from torch import nn

import lockstep as ls

PACE_S = 0.05  # a step; so that workers are lost and come back in one training
EPOCH = 20


class Say(ls.Callback):
    """Has the chief print each step with its time, and keeps the pace."""

    def on_train_batch_end(self, batch, logs):
        if strategy.workers.is_chief:
            print("step", self.model.training_state.position.step, time.time(), flush=True)  # noqa: T201
        threading.Event().wait(PACE_S)


torch.manual_seed(0)
kind = ls.MirroredStrategy if "alone" in sys.argv else ls.MultiWorkerMirroredStrategy
strategy = kind(["cpu:0"], replicas=4, threads_per_replica=1, seed=0)
with strategy.scope():
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
    model = ls.Model(network)
    model.compile(torch.optim.Adam(network.parameters(), 1e-2), loss=nn.CrossEntropyLoss(reduction="none"))
rows = torch.randn(EPOCH * 8 - 3, 16)  # the last batch is uneven
data = torch.utils.data.TensorDataset(rows, rows[:, :4].argmax(1))
batches = torch.utils.data.DataLoader(data, 8, shuffle=True)
backup = ls.BackupAndRestore(sys.argv[2], save_freq=10)
model.fit(batches, epochs=int(sys.argv[1]) // EPOCH, callbacks=[backup, Say()], verbose=0)
fingerprint = ls.fingerprint(model)
if strategy.workers.is_chief:
    print("fingerprint", fingerprint, flush=True)  # noqa: T201
strategy.close()
