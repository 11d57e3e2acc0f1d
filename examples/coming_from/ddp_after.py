"""Digits with Lockstep, on two replicas.

python examples/coming_from/ddp_after.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lockstep as ls

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the weights."""
    devices = ls.config.request_devices("cpu:2")  # on GPUs: None, which is all of them
    strategy = ls.MirroredStrategy(devices, seed=0)
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])
    order = torch.Generator()  # for the order of DistributedSampler; else shuffle=True
    loader = DataLoader(data, BATCH_SIZE, sampler=RandomSampler(data, generator=order))

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = strategy.mirror(network)
    optimizer = strategy.mirror(torch.optim.Adam(network.parameters(), lr=0.01))
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(model(pixels), labels, reduction="none")
        loss = ls.compute_average_loss(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        order.manual_seed(epoch)
        for pixels, labels in strategy.distribute_dataset(loader):
            loss = strategy.run(step, args=(pixels, labels))
            scheduler.step()
        loss = strategy.reduce("sum", loss)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
