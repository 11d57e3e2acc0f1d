"""Early stopping, the best checkpoint, and a run that goes on after an interruption.

    python examples/07_resume.py            # press Ctrl-C or send SIGTERM ...
    python examples/07_resume.py            # ... and start it again: it goes on in the middle of the epoch

The fingerprint at the end covers every bit of weights, optimizer state and random numbers. It is that of a run that was
not interrupted.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls


def main() -> None:
    """Trains, or goes on from the backup; then tests the best weights."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    with strategy.scope():
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.AdamW(network.parameters(), lr=2e-3),
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        )
    train, valid, test = digits()
    best = args.output / "best.safetensors"
    callbacks = [
        # Monitors end in the name of a loss or metric; `val_` is that of the validation data.
        ls.EarlyStopping(monitor="val_loss", patience=args.patience),
        ls.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),  # weights alone, with the network's own keys
        # Everything else that a training has: optimizer, random numbers, the position in the data, the other callbacks.
        # Written after every 20 batches and on SIGTERM, then the exit code is 75; removed when `fit` has ended. After
        # that the same command begins anew. Use one folder for one training.
        ls.BackupAndRestore(args.output / "backup", save_freq=args.save_freq),
        ls.CSVLogger(args.output / "log.csv", append=True),
    ]
    history = model.fit(train, validation_data=valid, epochs=args.epochs, callbacks=callbacks, verbose=2)

    # `fit` ends with the last weights, which are `patience` epochs older than the best.
    last = model.evaluate(test, verbose=0)
    model.load_weights(best)
    result = model.evaluate(test, verbose=0)
    print(f"{len(history.history['loss'])} epochs, best validation loss {min(history.history['val_loss']):.4f}")
    print(f"test with the last weights: loss {last['loss']:.4f}, accuracy {last['accuracy']:.3f} (chance: 0.100)")
    print(f"test with the best weights: loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f}")

    # The file is of plain PyTorch: no wrapper around the network, no prefix in its keys.
    from safetensors.torch import load_file

    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10))
    plain.load_state_dict(load_file(best))
    strategy.close()


def digits() -> tuple[DataLoader, DataLoader, DataLoader]:
    """Global batches of scikit-learn's 1,797 images of 8x8 pixels."""
    data = load_digits()
    rows = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))
    parts = [torch.utils.data.Subset(rows, range(*ends)) for ends in ((0, 1200), (1200, 1500), (1500, 1797))]
    return DataLoader(parts[0], 32, shuffle=True), DataLoader(parts[1], 256), DataLoader(parts[2], 256)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--epochs", type=int, default=200, help="at most")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better validation loss")
    parser.add_argument("--save-freq", type=int, default=20, help="global batches between backups")
    parser.add_argument("--output", type=Path, default=Path("runs/resume"), help="folder of weights, backup and log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
