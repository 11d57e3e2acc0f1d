"""Digits with Lockstep, on two replicas: accumulated and clipped gradients, a falling learning rate.

python examples/coming_from/accelerate_after.py
"""

from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lockstep as ls

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    strategy = ls.MirroredStrategy(ls.config.request_devices("cpu:2"), seed=0)  # on GPUs: ls.MirroredStrategy()
    torch.manual_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, BATCH_SIZE, sampler=order)

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.Adam(network.parameters(), lr=0.01))
    updates = EPOCHS * len(data) // BATCH_SIZE // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)

    def step(pixels: Tensor, labels: Tensor, sync_gradients: bool) -> Tensor:
        with nullcontext() if sync_gradients else model.no_sync():
            per_example = nn.functional.cross_entropy(model(pixels), labels, reduction="none")
            loss = ls.compute_average_loss(per_example)
            (loss / ACCUMULATE).backward()
        if sync_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        for number, (pixels, labels) in enumerate(strategy.distribute_dataset(loader), start=1):
            sync_gradients = number % ACCUMULATE == 0
            loss = strategy.reduce("sum", strategy.run(step, args=(pixels, labels, sync_gradients)))
            if sync_gradients:
                scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
