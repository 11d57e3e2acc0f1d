"""Digits with Lockstep, on two replicas, with accumulated gradients.

python examples/coming_from/accelerate_after.py
"""

from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lockstep as ls

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    devices = ls.config.request_devices("cpu:2")  # on GPUs: None, which is all of them
    strategy = ls.MirroredStrategy(devices, seed=0)
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, BATCH_SIZE, sampler=order)
    loader = strategy.distribute_dataset(loader)

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.Adam(network.parameters(), lr=0.01))
    updates = EPOCHS * len(data) // BATCH_SIZE // ACCUMULATE
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=updates)

    def step(pixels: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        with nullcontext() if is_last else model.no_sync():
            losses = cross_entropy(model(pixels), labels, reduction="none")
            loss = ls.compute_average_loss(losses)
            (loss / ACCUMULATE).backward()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        for number, (pixels, labels) in enumerate(loader, start=1):
            is_last = number % ACCUMULATE == 0
            loss = strategy.run(step, args=(pixels, labels, is_last))
            if is_last:
                scheduler.step()
        loss = strategy.reduce("sum", loss)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
