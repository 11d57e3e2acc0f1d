"""Digits with DistributedDataParallel, in two processes.

torchrun --nproc-per-node 2 examples/coming_from/ddp_before.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the weights."""
    dist.init_process_group("gloo")  # on GPUs: "nccl" and set_device(LOCAL_RANK)
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(pixels[:1792], labels[:1792])  # equal shards, as DDP wants
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=sampler)

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    def step(pixels: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = step(pixels, labels)
            scheduler.step()
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
