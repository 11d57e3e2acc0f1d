"""Trains a small network on handwritten digits as four replicas, on as many workers as there are.

Four workers, of which up to three may be lost at any time:

  lockstep run --workers 1:4 examples/elastic.py

The same training in one process:

  python examples/elastic.py

All end with the same fingerprint: the same bits of weights, optimizer state and random numbers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls


def main(argv: Sequence[str] | None = None) -> str:
    """Trains, or goes on from the last backup. Returns the fingerprint."""
    args = parse_arguments(argv)
    strategy = ls.MultiWorkerMirroredStrategy(replicas=4, threads_per_replica=1, seed=0)
    torch.manual_seed(0)  # of the first weights and the order of the images
    with strategy.scope():
        network = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.Adam(network.parameters(), 1e-3),
            loss=nn.CrossEntropyLoss(reduction="none"),
        )
    backup = ls.BackupAndRestore(args.backup, save_freq=args.save_freq)
    model.fit(digits(args.batch_size), epochs=args.epochs, callbacks=[backup], verbose=2)
    fingerprint = ls.fingerprint(model)
    strategy.close()
    return fingerprint


def digits(batch_size: int) -> DataLoader:
    """Global batches of scikit-learn's 1,797 images of 8x8 pixels. All workers together take one per step."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    return DataLoader(TensorDataset(pixels, torch.tensor(data.target)), batch_size, shuffle=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--backup", type=Path, default=Path("elastic-backup"), help="folder of the backups")
    parser.add_argument("--save-freq", type=int, default=20, help="global batches between backups")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
