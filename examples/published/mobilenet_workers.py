"""Trains MobileNetV2 on pictures, on several hosts. Each of them runs this program, and waits for the others.

    python examples/published/mobilenet_workers.py --index 0      # in one terminal
    python examples/published/mobilenet_workers.py --index 1      # in another

On two hosts, with the data of the published runs:

    --workers hosta:20000,hostb:20000 --data PetImages --pixels 224

Without --data it trains on scikit-learn's handwritten digits.
"""

import argparse
import json
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
    keras.utils.set_random_seed(0)  # the same on all workers

    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": args.workers.split(",")}, "task": {"type": "worker", "index": args.index}}
    )
    strategy = ls.MultiWorkerMirroredStrategy()  # waits for all workers
    batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

    dataset, classes = load(args.data, args.pixels, strategy)
    loader = DataLoader(dataset, batch_size, shuffle=True, collate_fn=rescale)  # each worker takes its rows of a batch

    with strategy.scope():
        model = keras.applications.MobileNetV2((args.pixels, args.pixels, 3), weights=None, classes=classes)
        model = distribute(model)
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=LEARNING_RATE),
            loss=keras.losses.sparse_categorical_crossentropy,
            metrics=[keras.metrics.sparse_categorical_accuracy],
        )

    model.fit(loader, epochs=args.epochs, verbose=2)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="localhost:20000,localhost:20001", help="their addresses, chief first")
    parser.add_argument("--index", type=int, required=True, help="which of them this is, from 0")
    parser.add_argument("--data", type=Path, help="folder with one folder of pictures for each class; default: digits")
    parser.add_argument("--pixels", type=int, default=32, help="height and width; published: 224")
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def load(
    data: Path | None, pixels: int, strategy: ls.MultiWorkerMirroredStrategy
) -> tuple[ConcatDataset[tuple[torch.Tensor, ...]], int]:
    """All pictures, [pixels, pixels, 3] of 0 to 255, with their labels; and the number of classes."""
    images = load_images(ImagesConfig(data=data, size=pixels), workers=strategy.workers)
    splits = [TensorDataset(split.pixels, torch.tensor(split.labels)) for split in images.splits.values()]
    return ConcatDataset(splits), len(images.classes)


def rescale(rows: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of pictures of 0 to 1, and their labels."""
    images, labels = default_collate(rows)
    return images / 255.0, labels


if __name__ == "__main__":
    main()
