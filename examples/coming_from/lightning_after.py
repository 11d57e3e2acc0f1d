"""Digits with Lockstep, on two replicas, with accumulated gradients.

python examples/coming_from/lightning_after.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1536], labels[:1536])
    order = torch.Generator()  # for the order of Lightning's sampler; else shuffle=True
    train = DataLoader(data, BATCH_SIZE, sampler=RandomSampler(data, generator=order))
    data = TensorDataset(pixels[1536:1792], labels[1536:1792])
    valid = DataLoader(data, BATCH_SIZE)
    devices = ls.config.request_devices("cpu:2")  # on GPUs: None, which is all of them
    strategy = ls.MirroredStrategy(devices, seed=0)
    with strategy.scope():
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model = ls.Model(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        updates = EPOCHS * len(train) // ACCUMULATE
        scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
        model.compile(
            optimizer=optimizer,
            scheduler=scheduler,
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
            accumulate=ACCUMULATE,
            clip_norm=1.0,
        )
    history = model.fit(
        train,
        validation_data=valid,
        epochs=EPOCHS,
        callbacks=[ls.LambdaCallback(on_epoch_begin=lambda n, _: order.manual_seed(n))],
        verbose=0,
    )
    last = {name: values[-1] for name, values in history.history.items()}
    print(f"loss {last['loss']:.4f}, val_accuracy {last['val_accuracy']:.4f}")
    torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
