"""Digits with Fabric, in two processes.

python examples/coming_from/fabric_before.py
"""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])  # equal shards
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH_SIZE // fabric.world_size))

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    model, optimizer = fabric.setup(network, optimizer)

    def step(pixels: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = cross_entropy(model(pixels), labels)
            fabric.backward(loss / ACCUMULATE)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        for number, (pixels, labels) in enumerate(loader, start=1):
            loss = step(pixels, labels, number % ACCUMULATE == 0)
        loss = fabric.all_reduce(loss, reduce_op="mean")
        fabric.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    if fabric.is_global_zero:
        torch.save(network.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
