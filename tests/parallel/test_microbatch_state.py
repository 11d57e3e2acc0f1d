"""Which modules of a pipeline keep something of the rows of a call, and that a trial pass leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lockstep._torch_compat import next_sequence_number
from lockstep.parallel.microbatch_state import StateWatch
from lockstep.parallel.pipeline import reads_weights
from lockstep.parallel.pipeline_values import leaving_no_trace


class Calls(nn.Module):
    """Counts its calls, in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1 / self.calls)


class Average(nn.Module):
    """Keeps a running mean, in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Cache(nn.Module):
    """Keeps what depends on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.ones) != x.shape[1]:
            self.ones = torch.ones(x.shape[1])
        return x * self.ones


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm that keeps nothing": lambda: nn.BatchNorm1d(6, track_running_stats=False).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "calls": Calls,
    "average": Average,
}
STATELESS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(6),
    "frozen batch norm": lambda: nn.BatchNorm1d(6).eval(),
    "frozen spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)).eval(),
    "dropout": nn.Dropout,
    "cache": Cache,
}


def rows(module: nn.Module) -> Tensor:
    return torch.randn(2, 6, 6) if isinstance(module, nn.InstanceNorm1d) else torch.randn(4, 6)


@pytest.mark.parametrize("name", [*STATEFUL, *STATELESS])
def test_what_a_call_changes_is_found(name: str):
    module = nn.Sequential(nn.Identity(), (STATEFUL | STATELESS)[name]())
    watch = StateWatch(module)
    module(rows(module[1]))
    assert bool(watch.changed()) == (name in STATEFUL)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_trial_pass_leaves_nothing(name: str):
    torch.manual_seed(0)
    module, other = STATEFUL[name](), STATEFUL[name]()
    other.load_state_dict(module.state_dict())
    x, more = rows(module), rows(module)
    drawn = torch.get_rng_state()
    with leaving_no_trace(module, torch.device("cpu")):
        module(nn.functional.dropout(more))
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.testing.assert_close(module(x), other(x), rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_loss_that_reads_weights_is_told_from_one_of_the_outputs_alone():
    module, other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(()))
    ids = frozenset(map(id, module.parameters()))
    scores = module(torch.ones(4, 3))
    outputs = {"scores": scores, "weight": module[1].weight, "hidden": SimpleNamespace(tensor=scores.exp()), "n": 1}
    begin = next_sequence_number()

    def reads(loss: Tensor) -> bool:
        return reads_weights(loss, outputs, ids, begin)

    assert not reads(scores.sum())
    assert not reads(scores.sum() * other + outputs["weight"].sum())
    assert not reads(outputs["hidden"].tensor.sum())
    assert not reads(scores.sum() + module[0].weight.detach().sum())
    assert reads(scores.sum() + module[0].weight.square().sum())
    assert reads(scores.sum() + 0.0 * module[1].bias.norm())
