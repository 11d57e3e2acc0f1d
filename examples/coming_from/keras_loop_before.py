"""Digits with Keras on torch in a loop of its own, on one device.

python examples/coming_from/keras_loop_before.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the model."""
    keras.utils.set_random_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(pixels, labels), BATCH_SIZE, shuffle=True)
    hidden, out = keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)
    model = keras.Sequential([keras.Input((64,)), hidden, out])
    optimizer = keras.optimizers.Adam(0.01)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(True)  # of logits
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        logits = model(pixels, training=True)
        loss = cross_entropy(labels, logits)
        model.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
        accuracy.update_state(labels, logits)
        return loss.detach()

    for epoch in range(EPOCHS):
        accuracy.reset_state()
        for pixels, labels in loader:
            loss = step(pixels, labels)
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}")
        print(f"accuracy {float(accuracy.result()):.4f}")
    model.save("digits.keras")


if __name__ == "__main__":
    main()
