"""Draws parity.svg, the plot of the README, from a real run: ``python docs/figures/draw_parity.py``, one minute.

A small convolutional network learns scikit-learn's digits in a loop of plain PyTorch on one device, then on 2, 4 and 8
replicas. 1,797 images in batches of 100, so that the last batch of each epoch has 97.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep as ls

EPOCHS, BATCH, REPLICAS = 3, 100, (2, 4, 8)
INK, BAND = "#78818c", "#98a1ab66"  # legible on white and on black; half transparent
COLOURS = "#d9822b", "#3d8bd4", "#5f9e3f"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def batches() -> list[tuple[Tensor, Tensor]]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return list(zip(images.split(BATCH), torch.tensor(data.target)[order].split(BATCH), strict=True))


def plain_losses() -> list[float]:
    """The loss of every step on one device, without Lockstep."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for images, labels in batches() * EPOCHS:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def replicated_losses(replicas: int) -> list[float]:
    """The loss of every step on that many replicas."""
    strategy = ls.MirroredStrategy([f"cpu:{n}" for n in range(replicas)], seed=0)
    module = network()
    model = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), 3e-3))

    def step(batch: tuple[Tensor, Tensor], global_batch_size: int) -> Tensor:
        images, labels = batch
        per_example = cross_entropy(model(images), labels, reduction="none")
        loss = ls.compute_average_loss(per_example, global_batch_size=global_batch_size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    data = batches() * EPOCHS
    losses = []
    for batch, (_, labels) in zip(strategy.distribute_dataset(data), data, strict=True):
        losses.append(strategy.reduce("sum", strategy.run(step, (batch, len(labels)))).item())
    strategy.close()
    return losses


def draw(plain: list[float], replicated: dict[int, list[float]], path: Path) -> None:
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9, **ink}):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        above.plot(plain, color=BAND, linewidth=6, solid_capstyle="round", label="one device, plain PyTorch")
        for (count, losses), colour, dash in zip(replicated.items(), COLOURS, (0, 3, 6), strict=True):
            above.plot(losses, color=colour, linewidth=1.4, linestyle=(dash, (3, 6)), label=f"{count} replicas")
            difference = [max(abs(a - b), 1e-9) for a, b in zip(losses, plain, strict=True)]
            below.plot(difference, color=colour, linewidth=0.9)
        above.set_ylabel("loss of the step")
        above.legend(frameon=False)
        below.set(ylabel="|difference|", xlabel="step", yscale="log", ylim=(1e-9, 1e-3))
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * max(REPLICAS))
    draw(plain_losses(), {count: replicated_losses(count) for count in REPLICAS}, Path(__file__).parent / "parity.svg")
