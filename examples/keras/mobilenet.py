"""Trains MobileNetV2 on pictures of handwritten digits by ``fit``, on all devices.

    KERAS_BACKEND=torch python examples/keras/mobilenet.py --epochs 5

``--data FOLDER`` trains on a folder of pictures instead, with one folder for each class.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from keras import layers
from PIL import Image
from sklearn.datasets import load_digits

import lockstep as ls
from lockstep.integrations.keras import distribute


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of pictures, one folder for each class")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in a global batch")
    parser.add_argument("--pixels", type=int, default=96, help="height and width")
    parser.add_argument("--rows", type=int, help="use only so many pictures")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    images, labels = pictures(args.data, args.pixels)
    order = np.random.default_rng(0).permutation(len(labels))[: args.rows]
    images, labels = images[order], labels[order]

    with ls.MirroredStrategy().scope():
        model = distribute(build(args.pixels, int(labels.max()) + 1))
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        images,
        labels,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_split=0.1,
        callbacks=[keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)],
        verbose=2,
    )


def build(pixels: int, classes: int) -> keras.Model:
    """The model, from pictures [rows, pixels, pixels, 3] to the probabilities of the classes."""
    inputs = keras.Input((pixels, pixels, 3))
    hidden = layers.Rescaling(1 / 255)(inputs)
    body = keras.applications.MobileNetV2((pixels, pixels, 3), include_top=False, weights=None, pooling="avg")
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(body(hidden)))


def pictures(folder: Path | None, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [rows, pixels, pixels, 3] uint8, and their classes."""
    if folder is None:
        data = load_digits()
        drawn = [
            (Image.fromarray((image * 15).astype("uint8")), target)
            for image, target in zip(data.images, data.target, strict=True)
        ]
    else:
        kinds = sorted(each for each in folder.iterdir() if each.is_dir())
        drawn = [(Image.open(file), index) for index, kind in enumerate(kinds) for file in sorted(kind.iterdir())]
    rows = [np.asarray(image.convert("RGB").resize((pixels, pixels))) for image, _ in drawn]
    return np.stack(rows), np.array([label for _, label in drawn])


if __name__ == "__main__":
    main()
