"""Quick start: a small network learns handwritten digits on all devices of this machine.

    python examples/01_quick_start.py
    python examples/01_quick_start.py --devices cpu:4

Without a GPU the CPU is divided into two logical devices, and everything works as on two GPUs. The numbers are those of
one device (`--devices cpu:1`), whatever the number of devices is.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls


def main() -> None:
    """Trains, tests, and predicts."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    print(f"{strategy.num_replicas_in_sync} replicas on {', '.join(device.name for device in strategy.devices)}")

    digits = load_digits()  # 1,797 images of 8x8 pixels
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    torch.manual_seed(0)  # decides the first weights and the order of the rows
    with strategy.scope():  # models made in here have a copy on every device
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.Adam(network.parameters(), lr=3e-3),
            loss=nn.CrossEntropyLoss(),
            # A metric gets what the network returns, here logits [rows, 10], and the labels [rows], of every row once.
            metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        )
    # The batch size is that of the global batch, which is divided among the devices: 64 rows are 32 for each of two.
    # The last batch of an epoch is smaller, and every row counts once all the same: do not drop or pad it.
    history = model.fit(
        pixels[:1500], labels[:1500], batch_size=64, epochs=args.epochs, validation_split=0.1, verbose=2
    )
    result = model.evaluate(pixels[1500:], labels[1500:], verbose=0)

    losses = history.history["loss"]
    print(f"loss {losses[0]:.4f} in the first epoch, {losses[-1]:.4f} in the last")
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} (chance: 0.100)")
    logits = model.predict(pixels[1500:1512])  # one tensor [12, 10] of all rows, in the order of the data
    print("predicted:", *logits.argmax(dim=1).tolist())
    print("labels:   ", *labels[1500:1512].tolist())
    strategy.close()  # ends the devices' threads; the end of the program does so too


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
