"""A mirrored optimizer's step outside replicas: the gradients are summed, then the program's, then the update's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests import oracle
from tests.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.strategies.mirrored import MirroredStrategy

CLIP = 0.7
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),  # not elementwise: updated in one thread
}


class Net(nn.Module):
    """With a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(rows, 4, generator=random, dtype=torch.float64) for rows in (7, 8, 1, 5)]


def one_device(make: Callable[..., torch.optim.Optimizer], *, accumulate: int = 1) -> tuple[list[Tensor], list[float]]:
    def loss(outputs: Tensor) -> tuple[Tensor, float]:
        return outputs.square().sum(), 1 / accumulate  # a sum, which is not divided

    training = oracle.train(make_net(), batches(), make, loss, accumulate=accumulate, clip_norm=CLIP)
    return [parameter.detach() for parameter in training.module.parameters()], training.norms


def mirrored_pair(
    strategy: MirroredStrategy, make: Callable[..., torch.optim.Optimizer]
) -> tuple[MirroredModule, MirroredOptimizer]:
    mirrored = strategy.mirror(make_net())
    return mirrored, strategy.mirror(make(mirrored.parameters()))


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_between_the_sum_and_the_step_equals_one_device(
    make_strategy: MakeStrategy, layout: str, name: str, accumulate: int, where: str
):
    make = OPTIMIZERS[name]
    weights, norms = one_device(make, accumulate=accumulate)
    strategy = make_strategy(4)
    mirrored, optimizer = mirrored_pair(strategy, make)
    seen = []

    def backward(x: Tensor, due: bool) -> None:
        mirrored(x).square().sum().backward()
        if due and where == "inside":
            optimizer.sum_gradients()

    for number, batch in enumerate(strategy.distribute_dataset(batches()), start=1):
        due = number % accumulate == 0
        strategy.run(backward, (batch, due))
        if due:
            if where == "outside":
                optimizer.sum_gradients()
            seen.append(float(nn.utils.clip_grad_norm_(mirrored.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()

    assert max(norms) > CLIP  # something was clipped
    torch.testing.assert_close(seen, norms, rtol=1e-10, atol=0)
    for copy in mirrored.copies:
        torch.testing.assert_close(list(copy.parameters()), weights, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("clip", [CLIP, 1e3, float("inf")])
def test_the_replicas_clip_the_sums_as_torch_does(make_strategy: MakeStrategy, layout: str, clip: float):
    net = make_net()
    strategy = make_strategy(4)
    mirrored, optimizer = mirrored_pair(strategy, OPTIMIZERS["adamw"])
    x = batches()[0]
    net(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), clip)

    def backward(shard: Tensor) -> None:
        mirrored(shard).square().sum().backward()
        optimizer.sum_gradients()

    for shards in strategy.distribute_dataset([x]):
        strategy.run(backward, (shards,))
    norm = optimizer.clip_sums(clip)

    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(mirrored.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_clipping_inside_a_replica_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    _, optimizer = mirrored_pair(strategy, OPTIMIZERS["adamw"])
    with pytest.raises(UsageError, match=r"clip_sums .*outside strategy\.run"):
        strategy.run(optimizer.clip_sums, (1.0,))


def test_a_step_outside_sums_by_itself(make_strategy: MakeStrategy, layout: str):
    strategy = make_strategy(3)
    mirrored, optimizer = mirrored_pair(strategy, lambda p: torch.optim.SGD(p, 0.1))
    before = [parameter.detach().clone() for parameter in mirrored.parameters()]

    for batch in strategy.distribute_dataset(batches()[:1]):
        strategy.run(lambda x: mirrored(x).sum().backward(), (batch,))
    optimizer.step()

    net = make_net()
    net(batches()[0]).sum().backward()
    for parameter, old, plain in zip(mirrored.parameters(), before, net.parameters(), strict=True):
        expected = old if plain.grad is None else old - 0.1 * plain.grad
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-10)


def test_a_step_inside_takes_what_was_summed(make_strategy: MakeStrategy, layout: str):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy, lambda p: torch.optim.SGD(p, 1.0))
    before = [parameter.detach().clone() for parameter in mirrored.parameters()]
    strategy.run(lambda: (mirrored(torch.ones(1, 4).double()).sum().backward(), optimizer.sum_gradients()))
    with torch.no_grad():
        for parameter in mirrored.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(1.0)

    strategy.run(optimizer.step)

    for copy in mirrored.copies:
        for parameter, old, name in zip(copy.parameters(), before, dict(copy.named_parameters()), strict=True):
            torch.testing.assert_close(parameter, old if "unused" in name else old - 1.0)


def test_gradients_added_to_sums_are_refused_and_zero_grad_forgets_the_sums(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored, optimizer = mirrored_pair(strategy, lambda p: torch.optim.SGD(p, 0.1))

    def backward() -> None:
        mirrored(torch.ones(1, 4).double()).sum().backward()

    strategy.run(backward)
    optimizer.sum_gradients()
    strategy.run(backward)
    with pytest.raises(UsageError, match=r"gradients were added after sum_gradients; .* before the next backward pass"):
        optimizer.step()

    optimizer.zero_grad()
    strategy.run(backward)
    optimizer.step()  # sums anew
    assert all(parameter.grad is None for parameter in mirrored.copies[1].parameters())
