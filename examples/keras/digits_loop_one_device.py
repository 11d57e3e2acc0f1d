"""Trains MobileNetV2 on handwritten digits in a loop of its own, on one device.

    python examples/keras/digits_loop_one_device.py

By default these are scikit-learn's digits. The published run has MNIST as folders of pictures, mnist/train/0 ... 9 and
mnist/test/0 ... 9:

    --data mnist --pixels 112
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from keras import layers
from torch.utils.data import DataLoader, TensorDataset

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

    model = build(args.pixels, len(data.classes))
    optimizer = keras.optimizers.Adam(1e-3)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(images, training=True)
        loss = loss_fn(labels, logits).mean()
        model.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(labels, logits)
        return loss.detach()

    def test_step(images: torch.Tensor, labels: torch.Tensor) -> None:
        accuracy.update_state(labels, model(images, training=False))

    for epoch in range(args.epochs):
        print(f"Epoch {epoch + 1}/{args.epochs}")
        accuracy.reset_state()
        bar = keras.utils.Progbar(len(train), stateful_metrics=["accuracy"])
        for number, (images, labels) in enumerate(train, start=1):
            loss = train_step(images, labels)
            bar.update(number, [("loss", float(loss)), ("accuracy", float(accuracy.result()))])
        accuracy.reset_state()
        with torch.no_grad():
            for images, labels in test:
                test_step(images, labels)
        print(f"test accuracy: {float(accuracy.result()):.4f}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
