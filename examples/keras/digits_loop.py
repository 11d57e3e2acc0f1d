"""Trains a convolutional network on handwritten digits in a loop of its own, on all devices.

KERAS_BACKEND=torch python examples/keras/digits_loop.py --epochs 5
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import lockstep as ls
from lockstep.integrations.keras import distribute


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    data = load_digits()
    images, labels = (data.images / 16).astype("float32")[..., None], data.target
    train, test = slice(0, 1500), slice(1500, None)

    with ls.MirroredStrategy().scope():
        model = distribute(build())
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])

    order = np.random.default_rng(0)
    for epoch in range(args.epochs):
        rows, losses = order.permutation(1500), []
        for start in range(0, 1500, args.batch_size):
            batch = rows[start : start + args.batch_size]
            logs = model.train_on_batch(images[train][batch], labels[train][batch], return_dict=True)
            losses.append(float(logs["loss"]))
        tested = model.evaluate(images[test], labels[test], verbose=0, return_dict=True)
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, test accuracy {tested['accuracy']:.4f}")


def build() -> keras.Model:
    """The model, from images [rows, 8, 8, 1] to the probabilities of the ten digits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


if __name__ == "__main__":
    main()
