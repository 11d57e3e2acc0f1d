"""``torch.compile`` around a mirrored module: whole graphs, the same bits in every run, the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lockstep as ls
from lockstep.config import LogicalDevice
from lockstep.strategies.mirrored import MirroredStrategy

REPLICAS = 5
ROWS = (15, 15, 14, 12, 15, 8, 15)  # shards of two sizes, and of others later


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.inner(x))))
        out: Tensor = self.outer(hidden * torch.sigmoid(hidden))
        return out


class Breaking(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture
def strategy(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]], nothing_compiled: None
) -> Iterator[MirroredStrategy]:
    with torch._inductor.config.patch(compile_threads=1), closing(MirroredStrategy(split_cpu(REPLICAS))) as made:
        yield made


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator)) for rows in ROWS
    ]


def network(kind: type[Net], **settings: Any) -> Net:
    torch.manual_seed(0)
    return kind(**settings)


def trained(strategy: MirroredStrategy, net: Net, around: Callable[[nn.Module], Callable[..., Any]]) -> Tensor:
    """The weights after steps in training mode, each followed by a call in evaluation mode."""
    torch._dynamo.reset()
    strategy.generators.begin(0, 0)
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
    called = around(mirrored)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        ls.compute_average_loss(nn.functional.cross_entropy(called(x), y, reduction="none")).backward()
        optimizer.step()

    def evaluate(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            called(x)

    for batch in strategy.distribute_dataset(batches()):
        mirrored.train()
        strategy.run(step, batch)
        mirrored.eval()
        strategy.run(evaluate, batch)
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


def on_one_device(net: Net) -> Tensor:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


def around_a_function(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x: module(x) * 1.0, backend="aot_eager", dynamic=True)


AROUND: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "graphs as they are": lambda module: torch.compile(module, backend="aot_eager"),
    "a function": around_a_function,
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_reruns_are_bit_equal_and_the_numbers_are_those_of_one_device(
    strategy: MirroredStrategy, around: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [trained(strategy, network(Net), AROUND[around]) for _ in range(2)]
    assert counters["stats"]["unique_graphs"]
    assert counters["stats"]["calls_captured"] / counters["stats"]["unique_graphs"] > 4  # no pieces of a forward
    assert "recompile_limit" not in caplog.text
    assert torch.equal(runs[0], runs[1])
    torch.testing.assert_close(runs[0], on_one_device(network(Net)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_by_inductor_is_the_replica_s_own(strategy: MirroredStrategy) -> None:
    runs = [trained(strategy, network(Net, dropout=0.5), torch.compile) for _ in range(2)]
    assert torch.equal(runs[0], runs[1])


def test_a_forward_that_is_no_single_graph_runs_as_it_is_with_a_warning(strategy: MirroredStrategy) -> None:
    with pytest.warns(UserWarning, match="compiles its whole forward or nothing.*cannot take the whole forward"):
        found = trained(strategy, network(Breaking), lambda module: torch.compile(module, backend="aot_eager"))
    torch.testing.assert_close(found, on_one_device(network(Net)), rtol=1e-5, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = trained(strategy, network(Breaking), lambda module: module)
    assert torch.equal(found, plain)
