"""The files that commands in the documentation take from their reader: a program, reviews, images, text, a model."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

PROGRAM = '''"""A small training, in one process or in several."""

import argparse
import os

import torch

import lockstep as ls

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8)
arguments, _ = parser.parse_known_args()

strategy = ls.MultiWorkerMirroredStrategy() if "RANK" in os.environ else ls.MirroredStrategy(seed=0)
torch.manual_seed(0)
with strategy.scope():
    network = torch.nn.Linear(4, 1)
    model = ls.Model(network)
    model.compile(torch.optim.SGD(network.parameters(), 0.1), torch.nn.MSELoss())
x = torch.randn(3 * arguments.batch_size + 1, 4)
model.fit(x, x.sum(dim=1, keepdim=True), batch_size=arguments.batch_size, epochs=arguments.epochs)
'''
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_files(folder: Path, commands: str) -> None:
    """Writes those of the files that ``commands`` name."""
    noise = np.random.default_rng(0)
    if "train.py" in commands:
        (folder / "train.py").write_text(PROGRAM)
    if "package.module" in commands:
        (folder / "package").mkdir()
        (folder / "package" / "module.py").write_text(PROGRAM)
    if "hotel.csv" in commands:
        _write_reviews(folder / "hotel.csv", noise)
    if "flower_photos" in commands:
        _write_images(folder / "flower_photos", noise)
    if "my_text" in commands:
        _write_text(folder / "my_text", noise)
    if "bert-base-chinese" in commands:
        _write_bert(folder / "bert-base-chinese")


def _write_reviews(path: Path, noise: np.random.Generator) -> None:
    words = noise.choice(list(LETTERS), (80, 6))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["label", "review"])
        table.writerows([number % 2, " ".join(row)] for number, row in enumerate(words))


def _write_images(folder: Path, noise: np.random.Generator) -> None:
    from PIL import Image

    for kind in ("daisy", "rose"):
        (folder / kind).mkdir(parents=True)
        for number in range(16):
            Image.fromarray(noise.integers(256, size=(16, 16, 3), dtype="uint8")).save(folder / kind / f"{number}.png")


def _write_text(folder: Path, noise: np.random.Generator) -> None:
    folder.mkdir()
    for split, rows in (("train", 40), ("valid", 8), ("test", 8)):
        lines = noise.choice(["one", "two", "three", "device", "devices", "replica", "model"], (rows, 30))
        (folder / f"tiny.{split}.tokens").write_text("\n".join(map(" ".join, lines)))


def _write_bert(folder: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    BertTokenizer(vocab={token: number for number, token in enumerate(vocabulary)}).save_pretrained(folder)
