"""A training loop with Accelerate that imports nothing of Lockstep.

Two processes, each with half of every batch:

  lockstep run --workers 2 examples/unchanged/accelerate_loop.py
"""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64  # images per step, over all processes


def digits() -> TensorDataset:
    """scikit-learn's 1,797 handwritten digits."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def main(output: str) -> None:
    """Trains, and saves the model."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(digits(), BATCH // accelerator.num_processes, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.save_model(model, output)
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    where = f"process {accelerator.process_index} of {accelerator.num_processes}"
    print(f"{where}: the weights add up to {weights}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["runs/unchanged-accelerate"])
