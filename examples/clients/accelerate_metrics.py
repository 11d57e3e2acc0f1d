"""A script as most are written for Accelerate, with accumulate and gather_for_metrics, and the same on replicas.

python examples/clients/accelerate_metrics.py
"""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls

BATCH, ACCUMULATE = 64, 3


def data() -> tuple[DataLoader, DataLoader]:
    """Digits to train with, in 9 batches of which the last has 28 rows, and to evaluate."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, valid = TensorDataset(pixels[:540], labels[:540]), TensorDataset(pixels[1500:], labels[1500:])
    return DataLoader(train, BATCH), DataLoader(valid, BATCH)


def network() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def with_accelerate() -> tuple[nn.Module, float]:
    """The script for Accelerate."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model, (train, valid) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for _ in range(2):
        model.train()
        for pixels, labels in train:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    right, rows = 0, 0
    for pixels, labels in valid:
        with torch.no_grad():
            answers = model(pixels).argmax(1)
        answers, labels = accelerator.gather_for_metrics((answers, labels))
        right, rows = right + int((answers == labels).sum()), rows + len(labels)
    return accelerator.unwrap_model(model), right / rows


def on_replicas(replicas: int) -> tuple[nn.Module, float]:
    """The same on replicas of one process."""
    strategy = ls.MirroredStrategy(replicas=replicas)
    plain, (train, valid) = network(), data()
    model = strategy.mirror(plain)
    optimizer = strategy.mirror(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    train, valid = strategy.distribute_dataset(train), strategy.distribute_dataset(valid)

    def step(pixels: Tensor, labels: Tensor, is_last: bool) -> None:
        with nullcontext() if is_last else model.no_sync():
            losses = cross_entropy(model(pixels), labels, reduction="none")
            (ls.compute_average_loss(losses) / ACCUMULATE).backward()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def answer(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return model(pixels).argmax(1), labels

    for _ in range(2):
        model.train()
        for number, (pixels, labels) in enumerate(train, start=1):
            is_last = number % ACCUMULATE == 0 or number == len(train)
            strategy.run(step, (pixels, labels, is_last))
    model.eval()
    right, rows = 0, 0
    for shards in valid:
        answers, labels = strategy.gather(strategy.run(answer, shards), axis=0)
        right, rows = right + int((answers == labels).sum()), rows + len(labels)
    return plain, right / rows


if __name__ == "__main__":
    _, accuracy = on_replicas(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
    print(f"accuracy {accuracy:.4f}")
