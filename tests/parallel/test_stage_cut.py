"""Plain modules cut into stages, in one process: one after another the stages are the module, or it is refused.

The assertion in ``Chain.forward`` is what is tested, so pytest must leave it as it is: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.pipeline_config import choose_pipeline_config
from lockstep.parallel.pipeline_stage import PipelineSplit, Stage
from lockstep.parallel.stage_cut import ModuleGraph

Change = Callable[["Chain", nn.Module, Tensor], Tensor]


class Chain(nn.Module):
    """Blocks, each called by ``change``, around what models have: an assertion, optional inputs, a tied weight."""

    def __init__(self, change: Change = lambda _, block, hidden: block(hidden)) -> None:
        super().__init__()
        self.change, self.calls, self.most = change, 0, 8
        self.body = nn.ModuleDict(
            {"words": nn.Embedding(9, 6), "places": nn.Embedding(8, 6), "blocks": nn.ModuleList(map(linear, range(4)))}
        )
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.body["words"].weight
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, words: Tensor, mask: Tensor | None = None, *, gain: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        _, length = words.size()
        assert length <= self.most, f"at most {self.most} words"
        first = self.body["words"](words) + self.body["places"](torch.arange(length, device=words.device))
        hidden = first * gain
        for number, block in enumerate(self.body["blocks"]):
            hidden = self.change(self, block, hidden)
            if mask is not None and number:
                hidden = hidden * mask[..., None]
        same = hidden
        hidden += 1
        if not self.training:
            hidden = same * self.scale * ~(words[:, :1] < 0)[..., None]
        self.steps += 1
        return self.head(hidden + first), {"last": [hidden], "steps": self.steps}


def linear(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def counted(chain: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    chain.calls += 1
    return block(hidden)


def frozen(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return block(hidden)


def averaged(chain: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    chain.steps = chain.steps * 0.9 + hidden.detach().mean()
    return block(hidden)


def in_half(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(hidden)


def recomputed(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(block, hidden, use_reentrant=False)


def branching(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden) if hidden.sum() > 0 else hidden


def noisy(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden) + torch.randn(6)


def skipping(_: Chain, block: nn.Module, hidden: Tensor) -> Tensor:
    return block(hidden) * random.random()


def stages_of(module: nn.Module, split: PipelineSplit = "auto", stages: int = 4) -> list[Stage]:
    """The stages of as many workers, each of which has a copy of the module."""
    pipelining, found = choose_pipeline_config("1f1b", None, stages), []
    for worker in range(stages):
        found += ModuleGraph(deepcopy(module), split, pipelining).cut(pipelining.stages_of(worker))
    return found


def run(stages: list[Stage], **inputs: Any) -> Any:
    values: Any = ()
    for stage in stages:
        values = stage(*values, inputs=inputs)
    return values


@pytest.mark.parametrize("split", ["auto", [1, 2, 1], ["body.blocks.1.1", "head"]])
def test_one_after_another_they_are_the_module(split: PipelineSplit):
    module = Chain()
    stages = stages_of(module, split, 3)
    words = torch.randint(9, (2, 5))
    inputs: list[dict[str, Any]] = [{}, {"mask": words > 2}, {"gain": 2.0}, {"mask": words > 4, "gain": 0.5}, {}]
    for training in (True, False):
        for each in (module, *(stage.model for stage in stages)):
            each.train(training)
        for given in inputs:
            expected, more = module(words, **given)
            found, rest = run(stages, words=words, **given)

            assert torch.equal(found, expected)
            assert torch.equal(rest["last"][0], more["last"][0])
            assert rest["steps"] == more["steps"]


def test_a_worker_has_the_weights_that_its_stage_uses_under_their_names():
    module = Chain()
    names = [{name for name, _ in stage.model.named_parameters(remove_duplicate=False)} for stage in stages_of(module)]

    assert set().union(*names) == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert [sorted({name.split(".")[2] for name in own if "blocks" in name}) for own in names] == [
        [each] for each in "0123"
    ]
    assert "body.words.weight" in names[0]
    assert {"head.weight", "scale"} <= names[3]


def test_an_assertion_of_the_forward_is_checked():
    stages = stages_of(Chain())
    with pytest.raises(AssertionError):
        run(stages, words=torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (counted, "'calls'"),
        (averaged, "'steps'"),
        (frozen, "no_grad"),
        (in_half, "autocast"),
        (recomputed, "checkpoint"),
        (branching, "control flow"),
        (noisy, "random numbers"),
        (skipping, "random numbers"),
    ],
)
def test_what_a_trace_would_do_otherwise_is_refused(change: Change, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        stages_of(Chain(change))
    assert "\n" not in str(caught.value)
    assert "Chain" in str(caught.value)


def test_in_a_block_of_its_own_all_of_that_is_possible():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(6, 6), 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                hidden = F.relu(hidden) if hidden.sum() > 0 else hidden
            return checkpoint(self.linear, hidden, use_reentrant=False)

    module = nn.Sequential(*(Own() for _ in range(4)))
    hidden = torch.randn(3, 6)

    assert torch.equal(run(stages_of(module), input=hidden), module(hidden))


class Penalised(nn.Module):
    """A block that keeps a penalty, as mixtures of experts do, and a width that stays."""

    def __init__(self, kept: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(6, 6), kept
        self.width, self.penalty = 6, None

    def forward(self, hidden: Tensor) -> Tensor:
        self.penalty = self.kept(hidden)
        return self.linear(hidden)


class Summed(nn.Module):
    def __init__(self, kept: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Penalised(kept) for _ in range(4))

    def forward(self, hidden: Tensor) -> tuple[Tensor, list[Any]]:
        for block in self.blocks:
            hidden = block(hidden) / block.width
        return hidden, [block.penalty for block in self.blocks]


@pytest.mark.parametrize("kept", [lambda hidden: hidden.square().mean(), len, lambda _: [1]])
def test_attributes_that_modules_change_as_they_run_are_refused_where_the_forward_reads_them(
    kept: Callable[[Tensor], Any],
):
    stages = stages_of(Summed(kept))
    with pytest.raises(UsageError, match=r"'penalty' of blocks\.0") as caught:
        run(stages, hidden=torch.randn(3, 6))
    assert "\n" not in str(caught.value)


def test_attributes_that_stay_are_read():
    module, hidden = Summed(lambda _: None), torch.randn(3, 6)
    expected, _ = module(hidden)
    found, penalties = run(stages_of(module), hidden=hidden)

    assert torch.equal(found, expected)
    assert penalties == [None] * 4


def test_hooks_that_no_stage_would_call_are_refused_where_modules_are_cut_and_called_elsewhere():
    module, called = Chain(), []
    module.body["blocks"][1].register_forward_hook(lambda *_: called.append(1))
    run(stages_of(module), words=torch.zeros(1, 3, dtype=torch.long))
    assert called == [1]
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="Chain has hooks"):
        stages_of(module)
