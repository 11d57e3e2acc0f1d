"""Trains KerasHub's BERT to fill in masked words, on four logical devices.

    python examples/published/masked_lm.py --lines 256 --epochs 2

The published program has WikiText-2 and pretrained weights:

    --data wikitext-2 --preset bert_tiny_en_uncased --sequence-length 512

Without --data it learns the documentation of the installed Python; without --preset it begins with random weights in
the sizes of BERT-tiny, and a vocabulary of the text.
"""

import argparse
import os
import random
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import grain
import keras
import keras_hub
from torch.utils.tensorboard import SummaryWriter

import lockstep as ls
from lockstep.integrations.keras import distribute
from lockstep_tools.recipes.text.corpus import python_text
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings, train_wordpiece


def main() -> None:
    """Trains, validates after each epoch, and tests."""
    args = parse_arguments()
    keras.utils.set_random_seed(0)

    # One device becomes four.
    gpus, cpus = ls.config.list_physical_devices("GPU"), ls.config.list_physical_devices("CPU")
    share = ls.config.LogicalDeviceConfiguration(memory_limit=args.memory_limit if gpus else None)
    ls.config.set_logical_device_configuration((gpus or cpus)[0], [share] * 4)
    strategy = ls.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")

    # Lines of more than 100 bytes. They are shuffled once, so every epoch has the same batches; its masks are new.
    train_lines, val_lines, test_lines = read_lines(args.data, args.lines)
    train_ds = grain.MapDataset.source(shuffle(train_lines, buffer_size=500)).batch(args.batch_size)
    val_ds = grain.MapDataset.source(val_lines).batch(args.batch_size)
    test_ds = grain.MapDataset.source(test_lines).batch(args.batch_size)

    # The preprocessor of the model makes tokens of the lines and masks 15% of them, at most 96 of a line.
    with strategy.scope():
        if args.preset:
            model = keras_hub.models.BertMaskedLM.from_preset(args.preset)
            model.preprocessor.sequence_length = args.sequence_length
        else:
            model = new_model(train_lines, args.vocabulary, args.sequence_length)
        model.backbone.get_layer("pooled_dense").trainable = False  # nothing here uses it
        model = distribute(model)
    decay = keras.optimizers.schedules.PolynomialDecay(
        args.learning_rate, decay_steps=args.epochs * len(train_ds), end_learning_rate=0.0
    )
    model.compile(
        optimizer=keras.optimizers.Adam(decay),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    model.summary()

    callbacks = [keras.callbacks.EarlyStopping(patience=2), TensorBoard(args.log_dir)]
    model.fit(train_ds, validation_data=val_ds, epochs=args.epochs, callbacks=callbacks)
    tested = model.evaluate(test_ds, return_dict=True)
    print(f"test: loss {tested['loss']:.4f}, accuracy {tested['accuracy']:.4f}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of WikiText; default: the documentation of Python")
    parser.add_argument("--preset", help="folder or name of a preset of KerasHub; default: random weights")
    parser.add_argument("--vocabulary", type=int, default=8000, help="number of tokens, without --preset")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens of a line; published: 512")
    parser.add_argument("--memory-limit", type=int, default=2048, help="of each logical GPU, in MB")
    parser.add_argument("--batch-size", type=int, default=128, help="lines of all devices in a batch")
    parser.add_argument("--lines", type=int, help="how many lines of each split; default: all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the first step; it falls linearly to 0")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/masked_lm"), help="folder for TensorBoard")
    return parser.parse_args()


def read_lines(folder: Path | None, most: int | None) -> list[list[str]]:
    """Lines of more than 100 bytes for training, validation and test, as tf.data.TextLineDataset reads them."""
    if folder:
        files = [next(folder.glob(f"*.{split}.tokens")) for split in ("train", "valid", "test")]
        splits = [file.read_bytes().decode().replace("\r", "").split("\n") for file in files]
    else:
        text = python_text()
        splits = [text.train, text.valid, text.test]
    return [[line for line in lines if len(line.encode()) > 100][:most] for lines in splits]


def shuffle(lines: list[str], *, buffer_size: int) -> list[str]:
    """The lines in the order of tf.data's shuffle: each is drawn from a buffer, and the next takes its place."""
    buffer, order = lines[:buffer_size], []
    for line in lines[buffer_size:]:
        slot = random.randrange(buffer_size)
        order.append(buffer[slot])
        buffer[slot] = line
    random.shuffle(buffer)
    return order + buffer


def new_model(
    lines: list[str], vocabulary: int, sequence_length: int, dropout: float = 0.1
) -> keras_hub.models.BertMaskedLM:
    """BERT-tiny with random weights, and its vocabulary, which is trained on the lines."""
    tokens = train_wordpiece(lines, WordPieceSettings(vocabulary=vocabulary)).get_vocab()
    tokenizer = keras_hub.models.BertTokenizer(sorted(tokens, key=tokens.get), lowercase=True)
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(tokenizer, sequence_length=sequence_length)
    backbone = keras_hub.models.BertBackbone(
        len(tokens), num_layers=2, num_heads=2, hidden_dim=128, intermediate_dim=512, dropout=dropout
    )
    return keras_hub.models.BertMaskedLM(backbone, preprocessor=preprocessor)


class TensorBoard(keras.callbacks.Callback):
    """Writes the logs of each epoch for TensorBoard. Keras's own callback needs TensorFlow."""

    def __init__(self, folder: Path) -> None:
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
