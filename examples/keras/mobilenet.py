"""Trains MobileNetV2 on pictures by fit, on all devices.

    python examples/keras/mobilenet.py --devices cpu:2

By default these are scikit-learn's handwritten digits. The published runs have folders of cats and dogs or of flowers,
one for each class:

    --data cats_vs_dogs --pixels 224
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
from keras import layers

import lockstep as ls
from lockstep.integrations.keras import distribute
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import load_images


def main() -> None:
    """Trains, validates after each epoch, and tests."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)
    data = load_images(ImagesConfig(data=args.data, size=args.pixels))
    train, valid, test = (
        (data.splits[name].pixels.numpy(), np.array(data.splits[name].labels)) for name in ("train", "valid", "test")
    )

    devices = ls.config.request_devices(args.devices) if args.devices else None
    strategy = ls.MirroredStrategy(devices)
    with strategy.scope():
        # By default batch norm uses the statistics of each replica's shard; this uses those of the whole batch.
        model = distribute(build(args.pixels, len(data.classes)), sync_batchnorm=True)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    batch_size = args.batch_size * strategy.num_replicas_in_sync
    model.fit(*train, batch_size=batch_size, epochs=args.epochs, validation_data=valid)
    tested = model.evaluate(*test, batch_size=batch_size, verbose=0, return_dict=True)
    print(f"test: loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.4f} ({len(test[1])} pictures)")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="such as gpu:0,gpu:2 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with one folder of pictures for each class; default: digits")
    parser.add_argument("--pixels", type=int, default=32, help="height and width; published: 224")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures of each device in a batch")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def build(pixels: int, classes: int) -> keras.Model:
    """MobileNetV2, from pictures [rows, pixels, pixels, 3] to the probabilities of the classes."""
    network = keras.applications.MobileNetV2((pixels, pixels, 3), weights=None, classes=classes)
    for layer in network.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.8  # 0.999 is for thousands of steps: after a hundred, predictions were by chance
    return keras.Sequential([keras.Input((pixels, pixels, 3)), layers.Rescaling(1 / 255), network])


if __name__ == "__main__":
    main()
