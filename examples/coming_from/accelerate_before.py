"""Digits with Accelerate, in two processes, with accumulated gradients.

torchrun --nproc-per-node 2 examples/coming_from/accelerate_before.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS, BATCH_SIZE, ACCUMULATE = 3, 64, 2


def main() -> None:
    """Trains, and saves the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])  # equal shards
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, BATCH_SIZE // accelerator.num_processes, sampler=order)

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    updates = EPOCHS * len(data) // BATCH_SIZE // ACCUMULATE
    steps = updates * accelerator.num_processes  # of Accelerate, one for each process
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    model, optimizer = accelerator.prepare(network, optimizer)
    loader, scheduler = accelerator.prepare(loader, scheduler)

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        for pixels, labels in loader:
            loss = step(pixels, labels)
        loss = accelerator.reduce(loss, "mean")
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "digits.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
