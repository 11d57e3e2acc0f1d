"""A program that any launcher starts: trains one model on all processes, and prints what its own process has.

python launched.py [several | one]
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import lockstep as ls


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of 5 and 3 rows, which 2 or 3 processes divide unevenly."""
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    return [(x[:5], x[:5].sum(1, keepdim=True)), (x[5:], x[5:].prod(1, keepdim=True))]


def make_module() -> nn.Module:
    module = nn.Linear(4, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.1, -0.2, 0.3, -0.4]]))
        module.bias.zero_()
    return module


def main() -> None:
    several = sys.argv[1:] != ["one"]
    make = ls.MultiWorkerMirroredStrategy if several else ls.MirroredStrategy
    strategy = make(["cpu:0"], seed=0, **({"timeout_s": 60.0} if several else {}))
    module = make_module()
    with strategy.scope():
        model = ls.Model(module)
        model.compile(optimizer=torch.optim.SGD(module.parameters(), 0.1), loss=nn.MSELoss())
        model.fit(batches(), epochs=3, verbose=0)
    workers = strategy.workers
    weights = [*module.weight.flatten().tolist(), *module.bias.tolist()]
    # In one write: launchers mix the lines of their processes.
    sys.stdout.write(json.dumps([workers.index, workers.size, workers.is_chief, weights]) + "\n")
    sys.stdout.flush()
    strategy.close()


if __name__ == "__main__":
    main()
