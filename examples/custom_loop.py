"""A training loop for MobileNetV2 on folders of images, on any number of devices.

plain_loop.py is the same program in plain PyTorch on one device. To see what differs:

    diff -y examples/plain_loop.py examples/custom_loop.py
"""

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


def main(argv: Sequence[str] | None = None) -> tuple[list[tuple[float, float]], nn.Module]:
    """Trains and tests. Returns loss and accuracy of every training step, and the trained network."""
    args = parse_arguments(argv)
    dtype = torch.float64 if args.float64 else torch.float32
    devices = ls.config.request_devices(args.devices) if args.devices else None
    strategy = ls.MirroredStrategy(devices, seed=0)
    # MobileNetV2 with a hidden layer of 512 before the output, and global batches of (images, labels).
    config = ImagesConfig(data=args.data, size=args.size, batch_size=args.batch_size, hidden=512, valid_fraction=0.0)
    task = build_images(config)
    # By default batch norm uses the statistics of each replica's shard; this uses those of the global batch.
    model = strategy.mirror(task.module.to(dtype), sync_batchnorm=True)
    optimizer = strategy.mirror(torch.optim.Adam(model.parameters(), lr=1e-3))
    # Without this every replica would get the whole batch, and the loss would be N times too large.
    train, test = strategy.distribute_dataset(task.train), strategy.distribute_dataset(task.test)

    def train_step(images: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        logits = model(images.to(dtype))
        per_example = F.cross_entropy(logits, labels, reduction="none")
        loss = ls.compute_average_loss(per_example, global_batch_size=rows)  # this shard's part of the mean
        loss.backward()
        optimizer.step()  # waits for all replicas, sums their gradients, updates once
        optimizer.zero_grad()
        return loss.detach(), (logits.argmax(1) == labels).sum()

    def test_step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(images.to(dtype))
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()

    steps = []
    for epoch in range(args.epochs):
        train.set_epoch(epoch)  # a new order
        model.train()
        with tqdm(train, desc=f"epoch {epoch + 1}/{args.epochs}", leave=False, disable=None) as bar:  # in a terminal
            for images, labels in bar:
                rows = sum(map(len, labels))  # one shard per replica; those of the last batch are smaller
                loss, right = strategy.reduce("sum", strategy.run(train_step, args=(images, labels, rows)))
                steps.append((float(loss), float(right) / rows))
                bar.set_postfix(loss=f"{steps[-1][0]:.4f}", accuracy=f"{steps[-1][1]:.3f}")
        print(f"epoch {epoch + 1}: loss {steps[-1][0]:.4f}, accuracy {steps[-1][1]:.3f} in the last batch", flush=True)

    model.eval()
    total, right, rows = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in test:
            rows += sum(map(len, labels))
            batch_loss, batch_right = strategy.reduce("sum", strategy.run(test_step, args=(images, labels)))
            total += float(batch_loss)
            right += int(batch_right)
    print(f"test: loss {total / rows:.4f}, accuracy {right / rows:.3f} ({rows} images)")
    strategy.close()
    return steps, task.module


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="such as gpu:0,gpu:2 or gpu:4x2048 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png; default: digits")
    parser.add_argument("--size", type=int, default=32, help="side of the images, in pixels")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
    parser.add_argument("--epochs", type=int, default=5)
    # In float64 both programs agree to seven digits. In float32 they differ from step 2 on: Adam's first update is
    # the sign of the gradient times the rate, and rounding decides the sign of a gradient near 0.
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
