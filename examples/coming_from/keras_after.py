"""Digits with Keras and Lockstep, on two replicas.

python examples/coming_from/keras_after.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
from sklearn.datasets import load_digits

import lockstep as ls
from lockstep.integrations.keras import distribute

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the model."""
    keras.utils.set_random_seed(0)
    digits = load_digits()
    pixels, labels = (digits.data / 16).astype("float32"), digits.target
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    devices = ls.config.request_devices("cpu:2")  # on GPUs: None, which is all of them
    with ls.MirroredStrategy(devices).scope():
        model = distribute(model)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        pixels,
        labels,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        validation_split=0.1,
        callbacks=[keras.callbacks.EarlyStopping(patience=2)],
        verbose=2,
    )
    model.save("digits.keras")


if __name__ == "__main__":
    main()
