"""Digits with Lockstep, on two replicas: validation, accumulated and clipped gradients, a falling learning rate.

python examples/coming_from/lightning_after.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(pixels[:1536], labels[:1536])
    order = torch.Generator()
    train = DataLoader(data, BATCH_SIZE, sampler=RandomSampler(data, generator=order))
    valid = DataLoader(TensorDataset(pixels[1536:1792], labels[1536:1792]), BATCH_SIZE)
    strategy = ls.MirroredStrategy(ls.config.request_devices("cpu:2"), seed=0)  # on GPUs: ls.MirroredStrategy()
    with strategy.scope():
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model = ls.Model(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        updates = EPOCHS * len(train) // ACCUMULATE
        model.compile(
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates),
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": MulticlassAccuracy(10, average="micro")},
            accumulate=ACCUMULATE,
            clip_norm=1.0,
        )
    # The order of Lightning's sampler; with shuffle=True in place of the sampler no callback is needed.
    as_lightning = ls.LambdaCallback(on_epoch_begin=lambda epoch, logs: order.manual_seed(epoch))
    history = model.fit(train, validation_data=valid, epochs=EPOCHS, callbacks=[as_lightning], verbose=0).history
    print({name: round(history[name][-1], 4) for name in ("loss", "val_accuracy")})
    torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
