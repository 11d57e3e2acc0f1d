"""Trains MobileNetV2 on handwritten digits in a loop of its own, on all devices.

    python examples/keras/digits_loop.py --devices cpu:2

By default these are scikit-learn's digits. The published run has MNIST as folders of pictures, mnist/train/0 ... 9 and
mnist/test/0 ... 9:

    --data mnist --pixels 112 --devices gpu:0,gpu:2,gpu:3
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.integrations.keras import distribute
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import load_images


def main() -> None:
    """Trains, and tests after each epoch."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)
    data = load_images(ImagesConfig(data=args.data, size=args.pixels, valid_fraction=0.0))
    train, test = (
        TensorDataset(data.splits[name].pixels, torch.tensor(data.splits[name].labels)) for name in ("train", "test")
    )
    train, test = DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size)

    devices = ls.config.request_devices(args.devices) if args.devices else None
    strategy = ls.MirroredStrategy(devices)
    with strategy.scope():
        # By default batch norm uses the statistics of each replica's shard; this uses those of the whole batch.
        model = distribute(build(args.pixels, len(data.classes)), sync_batchnorm=True)
    optimizer = keras.optimizers.Adam(1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    # Without this every replica would get the whole batch, and the loss would be N times too large.
    train, test = strategy.distribute_dataset(train), strategy.distribute_dataset(test)

    def train_step(images: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        logits = model(images, training=True)
        loss = ls.compute_average_loss(loss_fn(labels, logits), global_batch_size=rows)  # this shard's part of the mean
        model.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)  # sums the gradients of all replicas, updates once
        accuracy.update_state(labels, logits)
        return loss.detach()

    def test_step(images: torch.Tensor, labels: torch.Tensor) -> None:
        accuracy.update_state(labels, model(images, training=False))

    for epoch in range(args.epochs):
        print(f"Epoch {epoch + 1}/{args.epochs}")
        accuracy.reset_state()
        bar = keras.utils.Progbar(len(train), stateful_metrics=["accuracy"])
        for number, (images, labels) in enumerate(train, start=1):
            rows = sum(map(len, labels))  # one shard for each replica
            loss = strategy.reduce("SUM", strategy.run(train_step, args=(images, labels, rows)))
            bar.update(number, [("loss", float(loss)), ("accuracy", float(accuracy.result()))])
        accuracy.reset_state()
        with torch.no_grad():
            for images, labels in test:
                strategy.run(test_step, args=(images, labels))
        print(f"test accuracy: {float(accuracy.result()):.4f}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="such as gpu:0,gpu:2 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png; default: digits")
    parser.add_argument("--pixels", type=int, default=32, help="height and width; published: 112")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in a batch")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def build(pixels: int, classes: int) -> keras.Model:
    """MobileNetV2 and a hidden layer, from pictures [rows, pixels, pixels, 3] to the logits of the classes."""
    network = keras.applications.MobileNetV2((pixels, pixels, 3), include_top=False, weights=None, pooling="avg")
    for layer in network.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.8  # 0.999 is for thousands of steps: after a hundred, predictions were by chance
    pixels_in = keras.Input((pixels, pixels, 3))
    head = [layers.Dense(512, activation="relu"), layers.Dense(classes)]
    return keras.Sequential([pixels_in, layers.Rescaling(1 / 255), network, *head])


if __name__ == "__main__":
    main()
