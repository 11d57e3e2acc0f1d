"""On real GPUs: a ParallelStrategy on one and on two, replicas of one process on two. Against a loop by hand on one."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.config import DeviceRegistry

ONE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu

ROWS = (8, 8, 3)
RATE = 2**-3
"""Float32 holds it exactly: steps that are recorded read it so."""
LIMIT_S = 200


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    x = [torch.randn(rows, 8, generator=random).double() for rows in ROWS]
    return [(each, each[:, :2]) for each in x]


def by_hand() -> dict[str, Tensor]:
    module = network().cuda()
    optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=0.9)
    for x, y in batches() * 2:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x.cuda()), y.cuda()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return {name: value.cpu() for name, value in module.state_dict().items()}


def fit(strategy: ls.Strategy, module: nn.Module) -> dict[str, Tensor]:
    with strategy.scope():
        model = ls.Model(module)
        model.compile(
            lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.9),
            nn.MSELoss(reduction="none"),
            clip_norm=0.5,
        )
    model.fit(batches(), epochs=2, verbose=0)
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def compare(found: dict[str, Tensor]) -> None:
    for name, value in by_hand().items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@ONE
def test_parallel_alone_on_one_gpu(fresh_devices: DeviceRegistry):
    module = network()
    with closing(ls.ParallelStrategy(seed=0)) as strategy:
        assert strategy.devices[0].name == "gpu:0"
        found = fit(strategy, module)
        assert all(parameter.is_cuda for parameter in module.parameters())
    compare(found)


def divided(dropout: float) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    own = torch.cuda.current_device(), torch.cuda.device_count()
    strategy = ls.ParallelStrategy(tensor=2, seed=0, communication=ls.CommunicationOptions(lost_after_s=60))
    parts = strategy.parallelize(network(dropout), tensor_plan={"0": ColwiseParallel(), "3": RowwiseParallel()})
    weights = fit(strategy, parts)
    strategy.close()
    return {"weights": weights, "own": own}


@TWO
def test_tensor_ranks_on_two_gpus():
    pytest.importorskip("cloudpickle")
    found = ls.launch(divided, workers=2, args=(0.0,), timeout_s=LIMIT_S)
    assert found["own"] == (0, 1)  # each worker sees its own alone
    compare(found["weights"])


@TWO
def test_dropout_on_two_gpus_is_bit_equal_again():
    pytest.importorskip("cloudpickle")
    first, second = (ls.launch(divided, workers=2, args=(0.5,), timeout_s=LIMIT_S)["weights"] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def many_workers() -> dict[str, Tensor]:
    strategy = ls.MultiWorkerMirroredStrategy(seed=0, communication=ls.CommunicationOptions(lost_after_s=60))
    weights = fit(strategy, network())
    strategy.close()
    return weights


@TWO
def test_two_workers_with_a_gpu_each():
    pytest.importorskip("cloudpickle")
    compare(ls.launch(many_workers, workers=2, timeout_s=LIMIT_S))


@TWO
def test_two_gpus_of_one_process(fresh_devices: DeviceRegistry):
    runs = []
    for _ in range(2):
        with closing(ls.MirroredStrategy(["gpu:0", "gpu:1"], seed=0)) as strategy:
            module = network()
            mirrored = strategy.mirror(module)
            runs.append(fit(strategy, module))
            for copies in zip(*(each.parameters() for each in mirrored.copies), strict=True):
                assert [copy.device.index for copy in copies] == [0, 1]
                assert torch.equal(copies[0].cpu(), copies[1].cpu())
            rows = strategy.run(lambda: torch.ones(2, device=ls.get_replica_context().device.torch_device))  # type: ignore[union-attr]
            assert strategy.reduce("sum", rows).tolist() == [2.0, 2.0]
            assert strategy.gather(rows, axis=0).tolist() == [1.0] * 4

    compare(runs[0])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
