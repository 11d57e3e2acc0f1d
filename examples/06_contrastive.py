"""A contrastive loss as CLIP's, which compares every row with the rows of all devices.

    python examples/06_contrastive.py
    python examples/06_contrastive.py --devices cpu:4

Two encoders learn which upper half of a handwritten digit belongs to which lower half. Prints how often the right half
is among the ten nearest of the 297 of the test.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls


class TwoEncoders(nn.Module):
    """Maps upper and lower halves [rows, 32] to unit vectors [rows, 64] of one space."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(10.0).log())  # of the similarities; learnt, as in CLIP

    def forward(self, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both vectors of each row, and the factor for their products."""
        return F.normalize(self.upper(upper), dim=1), F.normalize(self.lower(lower), dim=1), self.scale.exp()


def main() -> None:
    """Trains, and looks for the lower half of each upper one."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    model = strategy.mirror(TwoEncoders())
    optimizer = strategy.mirror(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    halves = TensorDataset(pixels[:1500, :32], pixels[:1500, 32:])
    batches = strategy.distribute_dataset(DataLoader(halves, args.batch_size, shuffle=True))

    def step(upper: Tensor, lower: Tensor) -> Tensor:
        upper, lower, scale = model(upper, lower)
        # A device compares its own rows with those of all devices. Within its own rows alone a batch of 256 on four
        # devices would be four easier tasks with 63 wrong halves in place of 255, and `fit` refuses such a loss.
        # gather_rows is differentiable: the gradients of all devices come back to the rows that they compared with.
        all_upper, all_lower = ls.gather_rows((upper, lower))
        # Row i of the global batch belongs to row i. `numbers` are the numbers of this device's rows there; shards may
        # differ in length, so do not compute them from the number of the device.
        numbers = ls.row_numbers(upper)
        per_example = F.cross_entropy(scale * upper @ all_lower.T, numbers, reduction="none")
        per_example = per_example + F.cross_entropy(scale * lower @ all_upper.T, numbers, reduction="none")
        loss = ls.compute_average_loss(per_example / 2, global_batch_size=len(all_upper))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def found_in_ten_nearest() -> float:
        with torch.no_grad():
            upper, lower, _ = model(pixels[1500:, :32].to(device), pixels[1500:, 32:].to(device))
        nearest = (upper @ lower.T).topk(10, dim=1).indices
        return (nearest == torch.arange(len(upper), device=device)[:, None]).any(dim=1).float().mean().item()

    device = strategy.devices[0].torch_device  # outside of `run` the model is the first device's copy
    print(f"untrained: {found_in_ten_nearest():.3f} found (chance: {10 / 297:.3f})")
    for epoch in range(args.epochs):
        losses = [strategy.reduce("sum", strategy.run(step, args=batch)).item() for batch in batches]
        if (epoch + 1) % 10 == 0 or epoch + 1 == args.epochs:
            print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, {found_in_ten_nearest():.3f} found")
    strategy.close()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--batch-size", type=int, default=256, help="rows in a global batch")
    parser.add_argument("--epochs", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    main()
