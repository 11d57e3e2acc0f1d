"""Trains MobileNetV2 on pictures, on all devices of this machine.

    python examples/published/mobilenet.py --devices cpu:2

Published runs have cats_vs_dogs and tf_flowers, as folders with one folder of pictures for each class, and 224x224
pixels:

    --data PetImages --pixels 224
    --data flower_photos --pixels 224

Without --data it trains on scikit-learn's handwritten digits.
"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, default_collate

import lockstep as ls
from lockstep.integrations.keras import distribute
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.recipes.images.dataset import load_images

BATCH_SIZE_PER_REPLICA = 64
LEARNING_RATE = 0.001


def main() -> None:
    """Trains."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)

    strategy = ls.MirroredStrategy(args.devices)
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

    dataset, classes = load(args.data, args.pixels)
    loader = DataLoader(dataset, batch_size, shuffle=True, collate_fn=rescale)

    with strategy.scope():
        model = keras.applications.MobileNetV2((args.pixels, args.pixels, 3), weights=None, classes=classes)
        model = distribute(model)
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=LEARNING_RATE),
            loss=keras.losses.sparse_categorical_crossentropy,
            metrics=[keras.metrics.sparse_categorical_accuracy],
        )

    model.fit(loader, epochs=args.epochs)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    devices = ls.config.request_devices  # a wrong name ends in one line
    parser.add_argument("--devices", type=devices, help="such as gpu:0,gpu:2 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="folder with one folder of pictures for each class; default: digits")
    parser.add_argument("--pixels", type=int, default=32, help="height and width; published: 224")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def load(data: Path | None, pixels: int) -> tuple[ConcatDataset[tuple[torch.Tensor, ...]], int]:
    """All pictures, [pixels, pixels, 3] of 0 to 255, with their labels; and the number of classes."""
    images = load_images(ImagesConfig(data=data, size=pixels))
    splits = [TensorDataset(split.pixels, torch.tensor(split.labels)) for split in images.splits.values()]
    return ConcatDataset(splits), len(images.classes)


def rescale(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of pictures of 0 to 1, and their labels."""
    images, labels = default_collate(rows)
    return images / 255.0, labels


if __name__ == "__main__":
    main()
