"""A Model that is trained as it should be: a pair of total and count, an uneven last batch, a precision, workers."""

import sys

import torch
from torch import nn

import lockstep as ls

cpu = ls.config.list_physical_devices("CPU")[0]
ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 3)
precision, workers = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 3 else ("fp32", 0)
strategy = ls.MirroredStrategy(seed=0)
torch.manual_seed(1)
network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loss(outputs, labels):
    kept = labels > 0
    return nn.functional.cross_entropy(outputs[kept], labels[kept], reduction="sum"), kept.sum()


with strategy.scope():
    model = ls.Model(network)
    model.compile(optimizer=torch.optim.Adam(network.parameters(), 1e-2), loss=loss, clip_norm=1.0, precision=precision)
data = torch.utils.data.TensorDataset(torch.randn(19, 6), torch.randint(0, 3, (19,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)
model.fit(loader, epochs=5, verbose=0)
