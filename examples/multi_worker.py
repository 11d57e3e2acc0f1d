"""Trains a small network on handwritten digits with several workers, and resumes after an interruption.

Every worker runs this file. Two workers on one host:

  lockstep run --workers 2 examples/multi_worker.py

Without a launcher, in two terminals, with "index" 0 and 1:

  TF_CONFIG='{"cluster": {"worker": ["localhost:20000", "localhost:20001"]}, "task": {"type": "worker", "index": 0}}' \\
      python examples/multi_worker.py
"""

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


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains and tests. Returns the test loss and accuracy."""
    args = parse_arguments(argv)
    devices = ls.config.request_devices(args.devices) if args.devices else None
    strategy = ls.MultiWorkerMirroredStrategy(devices, seed=0)  # waits for all workers
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
    """Global batches of scikit-learn's 1,797 images of 8x8 pixels. All workers together take one per step."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train = TensorDataset(pixels[:1500], labels[:1500])
    test = TensorDataset(pixels[1500:], labels[1500:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 256)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="devices of each worker, as gpu:0 or cpu:2; default: every GPU, or the CPU")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backup", type=Path, help="folder of checkpoints, from which an interrupted run resumes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
