"""Trains BERT-tiny to fill in masked words of Python's own documentation, on one device.

    python examples/keras/masked_words_one_device.py

It takes some minutes on two cores. The published settings, for WikiText-2, are:

    --data wikitext-2 --vocabulary 30522 --sequence-length 512 --learning-rate 1e-4
"""

import argparse
import math
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
from keras import layers, ops

from lockstep_tools.recipes.text.corpus import python_text, read_folder
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings, encode, new_tokenizer

LAYERS, HIDDEN, HEADS, FEED_FORWARD, POSITIONS = 2, 128, 2, 512, 512
FRACTION, MAX_MASKED = 0.15, 96  # of the tokens of a line, and how many of one line at most


def main() -> None:
    """Trains, validates after each epoch, and tests."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)
    text = read_folder(args.data) if args.data else python_text()
    settings = WordPieceSettings(vocabulary=args.vocabulary)
    tokenizer = new_tokenizer(text.train, settings, max_tokens=args.sequence_length)
    train = MaskedLines(text.train, tokenizer, args, shuffled=True)
    valid, test = (MaskedLines(lines, tokenizer, args) for lines in (text.valid, text.test))

    model = build(args.vocabulary, args.dropout)
    rate = keras.optimizers.schedules.PolynomialDecay(args.learning_rate, args.epochs * len(train), 0.0)
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        weighted_metrics=["accuracy"],
    )
    callbacks = [keras.callbacks.EarlyStopping(patience=2)]
    if args.log_dir:
        callbacks.append(TensorBoard(args.log_dir))
    model.fit(train, validation_data=valid, epochs=args.epochs, callbacks=callbacks)
    tested = model.evaluate(test, verbose=0, return_dict=True)
    print(f"test: loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of WikiText; default: the documentation of Python")
    parser.add_argument("--vocabulary", type=int, default=8000, help="number of tokens; published: 30522")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens of a line, at most 512 (published)")
    parser.add_argument("--batch-size", type=int, default=128, help="lines in a batch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the first step; it falls linearly to 0")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--log-dir", type=Path, help="folder of logs for TensorBoard; default: none")
    return parser.parse_args()


def build(vocabulary: int, dropout: float) -> keras.Model:
    """BERT-tiny, from tokens and masked positions to the logits [rows, positions, vocabulary] of these."""
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    positions = keras.Input((None,), dtype="int32", name="positions")
    words = layers.ReversibleEmbedding(vocabulary, HIDDEN, embeddings_initializer=normal())
    encoder = build_encoder(words, dropout)
    encoder.get_layer("pooler").trainable = False  # nothing here uses it
    hidden, _ = encoder(tokens)
    masked = ops.take_along_axis(hidden, positions[:, :, None], axis=1)
    masked = normalized(layers.Dense(HIDDEN, activation="gelu", kernel_initializer=normal())(masked))
    return keras.Model({"tokens": tokens, "positions": positions}, Bias()(words(masked, reverse=True)))


def build_encoder(words: layers.ReversibleEmbedding, dropout: float) -> keras.Model:
    """The encoder, from tokens [rows, tokens] to hidden states [rows, tokens, HIDDEN] and [rows, HIDDEN]."""
    tokens = keras.Input((None,), dtype="int32")
    count = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    places = layers.Embedding(POSITIONS, HIDDEN, embeddings_initializer=normal())(count)
    sentences = layers.Embedding(2, HIDDEN, embeddings_initializer=normal())(ops.zeros_like(tokens))
    hidden = layers.Dropout(dropout)(normalized(words(tokens) + places + sentences))
    is_real = ops.not_equal(tokens, 0)[:, None, :]
    for _ in range(LAYERS):
        attention = layers.MultiHeadAttention(HEADS, HIDDEN // HEADS, dropout=dropout, kernel_initializer=normal())
        attended = attention(hidden, hidden, attention_mask=is_real)
        hidden = normalized(hidden + layers.Dropout(dropout)(attended))
        wide = layers.Dense(FEED_FORWARD, activation="gelu", kernel_initializer=normal())(hidden)
        hidden = normalized(hidden + layers.Dropout(dropout)(layers.Dense(HIDDEN, kernel_initializer=normal())(wide)))
    pooled = layers.Dense(HIDDEN, activation="tanh", kernel_initializer=normal(), name="pooler")(hidden[:, 0])
    return keras.Model(tokens, [hidden, pooled])


def normal() -> keras.Initializer:
    """A new one for each weight: one that is used twice gives the same numbers."""
    return keras.initializers.TruncatedNormal(stddev=0.02)


def normalized(hidden: keras.KerasTensor) -> keras.KerasTensor:
    """Layer normalisation, as in BERT."""
    return layers.LayerNormalization(epsilon=1e-12)(hidden)


class Bias(layers.Layer):
    """Adds a number of its own to each logit."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Makes the weight."""
        self.bias = self.add_weight(shape=shape[-1:], initializer="zeros", name="bias")

    def call(self, logits: keras.KerasTensor) -> keras.KerasTensor:
        """The sums."""
        return logits + self.bias


class MaskedLines(keras.utils.PyDataset):
    """Batches of lines, of which some tokens are masked: other ones in each epoch if ``shuffled``.

    A batch is the tokens and masked positions, the tokens that were there, and 1 for each of these that counts.
    """

    def __init__(
        self, lines: tuple[str, ...], tokenizer: object, args: argparse.Namespace, *, shuffled: bool = False
    ) -> None:
        super().__init__()
        encoded = encode(tokenizer, lines, max_tokens=args.sequence_length)
        self.tokens = keras.utils.pad_sequences(encoded, maxlen=args.sequence_length, padding="post")
        self.mask, self.special = tokenizer.mask_token_id, len(tokenizer.all_special_ids)  # which are the first
        self.vocabulary = len(tokenizer)
        self.slots = min(MAX_MASKED, round(FRACTION * args.sequence_length))
        self.batch_size, self.shuffled = args.batch_size, shuffled
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(len(self.tokens) / self.batch_size)

    def __getitem__(self, batch: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        order = np.random.default_rng(self.epoch).permutation(len(self.tokens)) if self.shuffled else slice(None)
        tokens = self.tokens[order][batch * self.batch_size : (batch + 1) * self.batch_size]
        random = np.random.default_rng((self.epoch, batch))
        is_word = tokens >= self.special
        # The positions of the highest of independent numbers are drawn without replacement.
        positions = np.argsort(np.where(is_word, -random.random(tokens.shape), 0.0), axis=1)[:, : self.slots]
        wanted = np.clip(np.round(FRACTION * is_word.sum(axis=1)), 1, self.slots)
        counts = np.arange(self.slots) < wanted[:, None]
        labels = np.take_along_axis(tokens, positions, axis=1)
        # Of the tokens to predict, 80% become the mask and 10% any word.
        fate, words = random.random(labels.shape), random.integers(self.special, self.vocabulary, labels.shape)
        seen = np.where(counts & (fate < 0.8), self.mask, np.where(counts & (fate >= 0.9), words, labels))
        masked = tokens.copy()
        np.put_along_axis(masked, positions, seen.astype(tokens.dtype), axis=1)
        return {"tokens": masked, "positions": positions.astype("int32")}, labels, counts.astype("float32")

    def on_epoch_end(self) -> None:
        """Draws another order and other masks."""
        self.epoch += self.shuffled


class TensorBoard(keras.callbacks.Callback):
    """Writes the logs of each epoch for TensorBoard. Keras's own callback needs TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__()
        self.writer = SummaryWriter(folder)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Adds an epoch."""
        for name, value in (logs or {}).items():
            self.writer.add_scalar(f"epoch_{name}", value, epoch)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Closes the file."""
        self.writer.close()


if __name__ == "__main__":
    main()
