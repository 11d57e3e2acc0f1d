"""Trains a small BERT to fill in masked words of Python's own documentation, on all devices.

    KERAS_BACKEND=torch python examples/keras/masked_words.py --epochs 5

``--data FILE`` trains on another text, a paragraph a line.
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers, ops

import lockstep as ls
from lockstep.integrations.keras import distribute

PADDING, UNKNOWN, MASK, FIRST_WORD = 0, 1, 2, 3
TOKENS, VOCABULARY, HIDDEN = 48, 4000, 128


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file, a paragraph a line")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="rows in a global batch")
    parser.add_argument("--rows", type=int, help="use only so many rows")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    tokens = tokenize(args.data.read_text() if args.data else "\n\n".join(topics.values()))[: args.rows]
    masked, weights = mask(tokens)

    with ls.MirroredStrategy().scope():
        model = distribute(build())
    steps = args.epochs * -(-len(tokens) // args.batch_size)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.PolynomialDecay(1e-3, steps, 0.0)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        weighted_metrics=["accuracy"],
    )
    model.fit(masked, tokens, sample_weight=weights, batch_size=args.batch_size, epochs=args.epochs, verbose=2)


def build() -> keras.Model:
    """The model, from word numbers [rows, TOKENS] to the logits of each word of the vocabulary."""
    inputs = keras.Input((TOKENS,), dtype="int32")
    places = layers.Embedding(TOKENS, HIDDEN)(ops.arange(TOKENS))
    hidden = layers.LayerNormalization()(layers.Embedding(VOCABULARY, HIDDEN)(inputs) + places)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, HIDDEN // 2, dropout=0.1)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dropout(0.1)(attended))
        wide = layers.Dense(HIDDEN)(layers.Dense(4 * HIDDEN, activation="gelu")(hidden))
        hidden = layers.LayerNormalization()(hidden + layers.Dropout(0.1)(wide))
    return keras.Model(inputs, layers.Dense(VOCABULARY)(hidden))


def tokenize(text: str) -> np.ndarray:
    """Rows [rows, TOKENS] of word numbers, one for each paragraph with at least eight words."""
    paragraphs = [re.findall(r"\w+|[^\w\s]", each.lower()) for each in re.split(r"\n\s*\n", text)]
    paragraphs = [each[:TOKENS] for each in paragraphs if len(each) >= 8]
    common = Counter(word for each in paragraphs for word in each).most_common(VOCABULARY - FIRST_WORD)
    numbers = {word: number for number, (word, _) in enumerate(common, FIRST_WORD)}
    rows = np.full((len(paragraphs), TOKENS), PADDING, "int32")
    for row, words in zip(rows, paragraphs, strict=True):
        row[: len(words)] = [numbers.get(word, UNKNOWN) for word in words]
    return rows


def mask(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows with 15% of their words masked, and the weights [rows, TOKENS], 1 for the masked words."""
    chosen = (np.random.default_rng(0).random(tokens.shape) < 0.15) & (tokens >= FIRST_WORD)
    return np.where(chosen, MASK, tokens), chosen.astype("float32")


if __name__ == "__main__":
    main()
