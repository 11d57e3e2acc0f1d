"""What asks for torch's default generator in a replica gets the replica's: checkpointing draws the same masks twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.config import LogicalDevice


class _Block(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.block = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 6), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.block(x) if self.mode == "plain" else self._checkpointed(x)
        return x

    def _checkpointed(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.mode == "reentrant")
        return out


def _gradients(strategy: ls.MirroredStrategy, mode: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = _Block(mode)
    mirrored = strategy.mirror(module)

    def step(x: Tensor) -> list[Tensor]:
        mirrored(x.requires_grad_()).square().sum().backward()
        with torch._C.DisableTorchFunction():  # a step's own look is at the sums of all replicas
            return [torch.zeros(()) if p.grad is None else p.grad for p in mirrored.parameters()]

    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    per_replica = strategy.local_results(strategy.run(step, (ls.PerReplica([x.clone(), x.clone()]),)))
    return [gradient for gradients in per_replica for gradient in gradients]


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_checkpointed_dropout_has_the_gradients_of_plain_dropout(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]], mode: str
) -> None:
    devices = split_cpu(2)
    results = {}
    for each in ("plain", mode):
        strategy = ls.MirroredStrategy(devices, seed=5)
        results[each] = _gradients(strategy, each)
        strategy.close()
    for plain, checkpointed in zip(results["plain"], results[mode], strict=True):
        assert torch.equal(plain, checkpointed)
    first, second = results["plain"][: len(results["plain"]) // 2], results["plain"][len(results["plain"]) // 2 :]
    assert not torch.equal(first[0], second[0])  # each replica drew its own masks


def test_rng_state_functions_reach_the_replicas_generator_inside_and_torchs_outside(
    split_cpu: Callable[[int], tuple[LogicalDevice, ...]],
) -> None:
    strategy = ls.MirroredStrategy(split_cpu(2), seed=5)
    outside = torch.get_rng_state()

    def draw_twice() -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            first = torch.rand(4)
        return first, torch.rand(4)

    first, second = strategy.run(draw_twice)
    for replica in range(2):
        assert torch.equal(first[replica], second[replica])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(outside, torch.get_rng_state())
    strategy.close()
