"""Pictures in class folders, MobileNetV2 and a training loop by hand: on as many devices as you name.

plain_loop.py is the same program on one device, line by line. What differs is what there is to learn:

    diff -y examples/plain_loop.py examples/custom_loop.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import lockstep as ls
from lockstep.recipes.images.config import ImagesConfig
from lockstep.recipes.images.train import build_images


def main(words: Sequence[str] | None = None) -> tuple[list[tuple[float, float]], nn.Module]:
    """Trains and tests; returns loss and accuracy of every training step, and the trained network."""
    args = arguments(words)
    dtype = torch.float64 if args.float64 else torch.float32
    devices = ls.config.apply_device_request(ls.config.parse_device_request(args.devices)) if args.devices else None
    strategy = ls.MirroredStrategy(devices, seed=0)
    # MobileNetV2 without its top, pooling, Dense(512), Dense(classes); and global batches of (pictures, labels).
    config = ImagesConfig(data=args.data, size=args.size, batch_size=args.batch_size, hidden=512, valid_fraction=0.0)
    task = build_images(config)
    # Left alone, each replica's batch norm sees its own shard. Over the global batch it is that of one device.
    model = strategy.mirror(task.module.to(dtype), sync_batchnorm=True)
    optimizer = strategy.mirror(torch.optim.Adam(model.parameters(), lr=1e-3))
    # Without this every replica would get the whole batch, and the loss would be as many times too large.
    train, test = strategy.distribute_dataset(task.train), strategy.distribute_dataset(task.test)

    def train_step(pictures: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        logits = model(pictures.to(dtype))
        per_example = F.cross_entropy(logits, labels, reduction="none")
        loss = ls.compute_average_loss(per_example, global_batch_size=rows)  # this shard's part of the mean
        loss.backward()
        optimizer.step()  # waits for all replicas, adds their gradients, updates once
        optimizer.zero_grad()
        return loss.detach(), (logits.argmax(1) == labels).sum()

    def test_step(pictures: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(pictures.to(dtype))
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()

    steps = []
    for epoch in range(args.epochs):
        train.set_epoch(epoch)  # another order
        model.train()
        with tqdm(train, desc=f"epoch {epoch + 1}/{args.epochs}", unit="batch") as bar:
            for pictures, labels in bar:
                rows = sum(map(len, labels))  # one shard for each replica; the last batch's are short, or empty
                loss, right = strategy.reduce("sum", strategy.run(train_step, args=(pictures, labels, rows)))
                steps.append((float(loss), float(right) / rows))
                bar.set_postfix(loss=f"{steps[-1][0]:.4f}", accuracy=f"{steps[-1][1]:.3f}")

    model.eval()
    total, right, rows = 0.0, 0, 0
    with torch.no_grad():
        for pictures, labels in test:
            rows += sum(map(len, labels))
            batch_loss, batch_right = strategy.reduce("sum", strategy.run(test_step, args=(pictures, labels)))
            total += float(batch_loss)
            right += int(batch_right)
    print(f"test: loss {total / rows:.4f}, accuracy {right / rows:.3f} ({rows} images)")
    strategy.close()
    return steps, task.module


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="gpu:0,gpu:2 or gpu:4x2048 or cpu:4 (shares); default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png; default: digits")
    parser.add_argument("--size", type=int, default=32, help="side of the pictures, in pixels")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in a global batch, of all replicas")
    parser.add_argument("--epochs", type=int, default=5)
    # In double precision both programs agree to seven digits. In single they part at the second step: Adam's first one
    # is the gradient's sign times the rate, and the sign of a gradient that is next to nothing is a matter of rounding.
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
