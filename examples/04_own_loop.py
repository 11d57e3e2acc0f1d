"""A training loop of your own, with gradient accumulation, clipping, a learning-rate schedule and validation.

    python examples/04_own_loop.py
    python examples/04_own_loop.py --devices cpu:4 --accumulate 4

The losses are those of one device, also those of the last update of an epoch, which has fewer rows.
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls


def main() -> None:
    """Trains, and validates after each epoch."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    # `mirror` gives every device a copy and returns a module that stands for them all: from here on use it in place of
    # `network`. (`with strategy.scope()` is for `ls.Model`; a loop of your own does not need it.)
    # Without sync_batchnorm each device normalises with the mean of its own rows, and the numbers are not those of one.
    model = strategy.mirror(network, sync_batchnorm=True)
    optimizer = strategy.mirror(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    accuracy = strategy.mirror(MulticlassAccuracy(num_classes=10, average="micro"))
    train_data, valid_data = digits()
    # Batches are global ones: of 32 rows each of two devices gets 16.
    train = strategy.distribute_dataset(DataLoader(train_data, batch_size=32, shuffle=True))
    valid = strategy.distribute_dataset(DataLoader(valid_data, batch_size=256))
    updates = args.epochs * -(-len(train) // args.accumulate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

    def update(batches: list[tuple[Tensor, Tensor]], rows: int) -> tuple[Tensor, Tensor]:
        """Every device calls this with its own part of some batches, which have `rows` rows on all devices together."""
        total = torch.zeros((), device=batches[0][0].device)
        for number, (images, labels) in enumerate(batches):
            # Gradients are summed over the devices once, in the last backward pass.
            with nullcontext() if number == len(batches) - 1 else model.no_sync():
                per_example = F.cross_entropy(model(images), labels, reduction="none")
                # The sum over this device's rows, divided by the rows of all devices and all batches of the update. A
                # mean over its own rows would give those of a short batch too much weight.
                loss = ls.compute_average_loss(per_example, global_batch_size=rows)
                loss.backward()
            total += loss.detach()
        # Every device has the sums of all now, so this clips by the norm of the whole gradient.
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    def validate(images: Tensor, labels: Tensor) -> Tensor:
        logits = model(images)
        accuracy.update(logits, labels)  # `compute` outside counts each row of every device once
        return F.cross_entropy(logits, labels, reduction="sum")

    for epoch in range(args.epochs):
        model.train()
        losses = []
        for batches in groups(iter(train), args.accumulate):
            # A distributed batch has one shard of labels for each device; the lengths of shards may differ by one.
            rows = sum(len(shard) for _, labels in batches for shard in labels)
            parts, norms = strategy.run(update, args=(batches, rows))
            losses.append(strategy.reduce("sum", parts).item())  # each device returns its part of the mean
            norm = strategy.reduce("mean", norms).item()  # equal on all devices
            schedule.step()  # per update, outside of `run`: once, not once for each device

        model.eval()
        accuracy.reset()
        total = 0.0
        with torch.no_grad():
            for images, labels in valid:
                total += strategy.reduce("sum", strategy.run(validate, args=(images, labels))).item()
        print(
            f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, last update {losses[-1]:.4f} (norm {norm:.3f}); "
            f"validation: loss {total / len(valid_data):.4f}, accuracy {accuracy.compute().item():.3f} (chance: 0.100)"
        )
    strategy.close()


def groups(batches: Iterator, size: int) -> Iterator[list]:
    """Lists of `size` batches; the last may have fewer."""
    while group := list(itertools.islice(batches, size)):
        yield group


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1,797 images of 8x8 pixels: 1,500 to train, the others to validate."""
    data = load_digits()
    pixels, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    return TensorDataset(pixels[:1500], labels[:1500]), TensorDataset(pixels[1500:], labels[1500:])


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of 32 rows in an update")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
