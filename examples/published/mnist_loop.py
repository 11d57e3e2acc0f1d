"""Trains MobileNetV2 and a hidden layer on digits in a loop of its own, on devices picked by name.

    python examples/published/mnist_loop.py --devices cpu:2

The published program has MNIST as folders of pictures, mnist/train/0 ... 9 and mnist/test/0 ... 9, of 112x112 pixels,
and three of the GPUs:

    --data mnist --pixels 112 --devices gpu:0,gpu:2,gpu:3 --momentum 0.999

Without --data it trains on scikit-learn's handwritten digits.
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lockstep as ls
from lockstep.integrations.keras import distribute
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import load_images


def main() -> None:
    """Trains, and tests after each epoch."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)

    strategy = ls.MirroredStrategy(args.devices)
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    global_batch_size = args.batch_size * strategy.num_replicas_in_sync

    images = load_images(ImagesConfig(data=args.data, size=args.pixels, valid_fraction=0.0)).splits
    train, test = (TensorDataset(images[name].pixels, torch.tensor(images[name].labels)) for name in ("train", "test"))
    # The published program leaves this out: every replica has the whole batch, and the loss is as many times too large
    # as there are replicas. Lockstep warns of it.
    train_dist = strategy.distribute_dataset(DataLoader(train, global_batch_size, shuffle=True))
    test_dist = strategy.distribute_dataset(DataLoader(test, global_batch_size))

    with strategy.scope():
        model = distribute(new_model(args.pixels, args.momentum))
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer = keras.optimizers.Adam(learning_rate=0.001)

    def compute_loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
        per_example_loss = loss_object(labels, predictions)
        return ls.compute_average_loss(per_example_loss)  # the rows of the batch are counted: the last one is short

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
        model.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)  # sums the gradients of all replicas, updates once
        accuracy.update_state(labels, predictions)
        return loss.detach()

    def test_step(images: torch.Tensor, labels: torch.Tensor) -> None:
        accuracy.update_state(labels, model(images, training=False))

    for epoch in range(args.epochs):
        accuracy.reset_state()
        total_loss = 0.0
        with tqdm(train_dist, desc=f"Epoch {epoch + 1}/{args.epochs}") as bar:
            for step, (images, labels) in enumerate(bar, start=1):
                per_replica_losses = strategy.run(train_step, args=(images, labels))
                total_loss += float(strategy.reduce("SUM", per_replica_losses))
                bar.set_postfix(loss=total_loss / step, accuracy=float(accuracy.result()))
        print(f"Epoch {epoch + 1}: loss {total_loss / step:.4f}, accuracy {float(accuracy.result()):.4f}")

        accuracy.reset_state()
        with torch.no_grad():
            for images, labels in test_dist:
                strategy.run(test_step, args=(images, labels))
        print(f"test accuracy {float(accuracy.result()):.4f}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    devices = ls.config.request_devices  # a wrong name ends in one line
    parser.add_argument("--devices", type=devices, help="such as gpu:0,gpu:2 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png; default: digits")
    parser.add_argument("--pixels", type=int, default=32, help="height and width; published: 112")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures of each device in a batch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--momentum", type=float, default=0.8, help="of batch norms; published: 0.999, which is for thousands of steps"
    )
    return parser.parse_args()


def new_model(pixels: int, momentum: float) -> keras.Model:
    """MobileNetV2 without its top and a new one, from pictures [rows, pixels, pixels, 3] to logits [rows, 10]."""
    base = keras.applications.MobileNetV2((pixels, pixels, 3), include_top=False, weights=None)
    for layer in base.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = momentum
    inputs = [keras.Input((pixels, pixels, 3)), layers.Rescaling(1 / 255)]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(512, activation="relu"), layers.Dense(10)]
    return keras.Sequential([*inputs, base, *head])


if __name__ == "__main__":
    main()
