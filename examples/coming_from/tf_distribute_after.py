"""Classes of generated rows with Lockstep, on two logical devices of the CPU.

python examples/coming_from/tf_distribute_after.py
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the weights."""
    cpu = ls.config.list_physical_devices("CPU")[0]
    half = ls.config.LogicalDeviceConfiguration()
    ls.config.set_logical_device_configuration(cpu, [half, half])
    strategy = ls.MirroredStrategy(["cpu:0", "cpu:1"])
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1797, 64)).astype("float32")
    y = x[:, :10].argmax(axis=1)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    batches = DataLoader(data, BATCH_SIZE)

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for weight in network.parameters():  # [outputs, inputs], a kernel the reverse
        start = 0.1 * draw.normal(size=weight.shape[::-1]).astype("float32")
        weight.data = torch.from_numpy(start.T)
    model = strategy.mirror(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    optimizer = strategy.mirror(optimizer)

    def step(rows: Tensor, classes: Tensor) -> Tensor:
        logits = model(rows)
        losses = cross_entropy(logits, classes, reduction="none")
        loss = ls.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train_step(rows: Tensor, classes: Tensor) -> Tensor:
        losses = strategy.run(step, args=(rows, classes))
        return strategy.reduce("SUM", losses, axis=None)

    for epoch in range(EPOCHS):
        for rows, classes in strategy.distribute_dataset(batches):
            loss = train_step(rows, classes)
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}")
    weights = network.state_dict().values()
    np.savez("weights.npz", *(weight.numpy().T for weight in weights))


if __name__ == "__main__":
    main()
