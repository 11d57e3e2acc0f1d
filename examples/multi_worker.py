"""One program for one host or many: a small network learns handwritten digits, and goes on where it was interrupted.

Every worker runs this file. On one host, with two workers:

  lockstep run --workers 2 examples/multi_worker.py

Without a launcher, each in a terminal of its own, with "index" 0 and 1:

  TF_CONFIG='{"cluster": {"worker": ["localhost:20000", "localhost:20001"]}, "task": {"type": "worker", "index": 0}}' \\
      python examples/multi_worker.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Trains and tests; returns loss and accuracy of the test."""
    args = arguments(words)
    devices = ls.config.apply_device_request(ls.config.parse_device_request(args.devices)) if args.devices else None
    strategy = ls.MultiWorkerMirroredStrategy(devices, seed=0)  # waits until all workers are there
    train, test = digits(args.batch_size)
    with strategy.scope():
        network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.Adam(network.parameters(), 1e-3),
            loss=nn.CrossEntropyLoss(reduction="none"),
            metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
        )
    callbacks = [ls.BackupAndRestore(args.backup)] if args.backup else []
    model.fit(train, validation_data=test, epochs=args.epochs, callbacks=callbacks)
    result = model.evaluate(test)
    strategy.close()
    return result


def digits(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """scikit-learn's 1,797 pictures of 8x8 pixels, in global batches: what all workers together take in a step."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train = TensorDataset(pixels[:1500], labels[:1500])
    test = TensorDataset(pixels[1500:], labels[1500:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 256)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="of each worker: gpu:0 or cpu:2 (shares); default: every GPU, or the CPU")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in a global batch, of all replicas")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backup", type=Path, help="folder of checkpoints; a run that was interrupted goes on there")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
