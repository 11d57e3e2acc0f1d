"""A program that has a process group of torch before it makes its strategy, as engines and other libraries do.

python started_group.py INIT_METHOD RANK SIZE BACKEND [mirrored | tensor]
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lockstep as ls


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.linspace(-1, 1, 40).reshape(10, 4)
    return [(x[:7], x[:7, :2] ** 2), (x[7:], x[7:, 2:])]


def start_group(init_method: str, rank: int, size: int, backend: str) -> None:
    if backend == "accelerate":
        from accelerate import PartialState

        PartialState(cpu=True)
        return
    if backend == "fake":  # torch's own for tests without other processes: its store keeps nothing
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def train(divided: bool) -> list[float]:
    network = make_module()
    if divided:
        strategy = ls.ParallelStrategy(tensor=2, seed=0, timeout_s=60.0)
        network = strategy.parallelize(network, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0, timeout_s=60.0)
    with strategy.scope():
        model = ls.Model(network)
        model.compile(torch.optim.SGD(network.parameters(), 0.1), loss=nn.MSELoss(reduction="none"))
    model.fit(batches(), epochs=3, verbose=0)
    weights = [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
    strategy.close()
    return weights


def main() -> None:
    init_method, rank, size, backend, *kind = sys.argv[1:]
    start_group(init_method, int(rank), int(size), backend)
    # Twice: the second strategy must not meet at the address of the first.
    seen = [train(kind == ["tensor"]) for _ in range(2)]
    total = torch.ones(())
    dist.all_reduce(total)  # the program's own group is as it was
    sys.stdout.write(json.dumps([dist.get_rank(), dist.get_world_size(), total.item(), *seen]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
