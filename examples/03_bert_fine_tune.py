"""A BERT of transformers learns to classify texts.

    python examples/03_bert_fine_tune.py
    python examples/03_bert_fine_tune.py --devices cpu:4 --epochs 10

The texts are docstrings of Python's own library, the classes the packages that they come from. Nothing is
downloaded: the program makes a tokenizer and a small BERT with random weights. Comments say what to load instead.
"""

import argparse
import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, DataCollatorWithPadding
from transformers import get_linear_schedule_with_warmup as warmup
from transformers.modeling_outputs import SequenceClassifierOutput

import lockstep as ls

PACKAGES = ("asyncio", "email", "importlib", "logging")


def main() -> None:
    """Fine-tunes, tests, and classifies a text."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    texts, labels = docstrings()
    tokenizer = make_tokenizer(texts)  # BertTokenizer.from_pretrained("bert-base-uncased")
    encoded = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)]
    train_rows = [row for number, row in enumerate(rows) if number % 5]  # a `datasets.Dataset` works here as well
    pad, test_rows = DataCollatorWithPadding(tokenizer), rows[::5]

    def collate(rows: list[dict]) -> tuple[dict[str, Tensor], Tensor]:
        # `fit` takes pairs (x, y). If x is a dict, the model gets it as keyword arguments. The labels do not go to the
        # model: it would return their mean loss, and the mean of a device's rows alone says nothing of their number.
        inputs = dict(pad(rows))
        return inputs, inputs.pop("labels")

    train = DataLoader(train_rows, batch_size=32, shuffle=True, collate_fn=collate)  # 32 is the global batch
    test = DataLoader(test_rows, batch_size=128, collate_fn=collate)

    def loss(outputs: SequenceClassifierOutput, labels: Tensor) -> Tensor:
        # Models of transformers return an object. A loss of your own gets all of it; torch's losses, such as
        # `torch.nn.CrossEntropyLoss()`, and metrics get its logits. One loss per row is returned: Lockstep divides the
        # sum of all rows by their number once.
        return F.cross_entropy(outputs.logits, labels, label_smoothing=0.05, reduction="none")

    with strategy.scope():
        # BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=len(PACKAGES)), and lr=2e-5
        config = BertConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=256, max_position_embeddings=64, num_labels=len(PACKAGES),
            hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
        )  # fmt: skip
        bert = BertForSequenceClassification(config)
        model = ls.Model(bert)
        updates = args.epochs * len(train)  # the same on any number of devices
        model.compile(
            optimizer=torch.optim.AdamW(bert.parameters(), lr=1e-3),
            loss=loss,
            metrics={"accuracy": MulticlassAccuracy(num_classes=len(PACKAGES), average="micro")},
            scheduler=lambda optimizer: warmup(optimizer, updates // 10, updates),
            clip_norm=1.0,
        )
    model.fit(train, epochs=args.epochs, verbose=2)
    result = model.evaluate(test, verbose=0)
    chance = max(labels.count(label) for label in set(labels)) / len(labels)
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} (chance: {chance:.3f})")

    text = "Return the payload of the message, decoded from base64."
    outputs = model.predict([(dict(tokenizer([text], return_tensors="pt")),)])  # the model's own object
    print(f"{text!r} is of {PACKAGES[outputs.logits.argmax()]}")
    bert.save_pretrained(args.output)  # the plain module has the trained weights; from_pretrained reads them
    tokenizer.save_pretrained(args.output)


def docstrings() -> tuple[list[str], list[int]]:
    """The docstrings of some packages of this Python, and the number of the package of each."""
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(importlib.util.find_spec(package).origin).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    texts.append(text)
                    labels.append(label)
    return texts, labels


def make_tokenizer(texts: list[str]) -> BertTokenizer:
    """A WordPiece tokenizer of the commonest 1,500 words, and of characters for the others."""
    words = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    characters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{one}" for one in characters)]
    pieces += [word for word, _ in words.most_common(1500)]
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(dict.fromkeys(pieces))})


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("runs/bert"), help="folder of the trained model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
