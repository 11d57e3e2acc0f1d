"""Which replica updates which weights, and that it makes no difference to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import oracle
from tests.conftest import MakeStrategy
from torch import Tensor, nn

import lockstep as ls
from lockstep.mirroring.optim.update import balance


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([10, 1, 1, 8], 2, ((0,), (1, 2, 3))),
        ([4, 4, 4], 3, ((0,), (1,), (2,))),
        ([5], 3, ((0,), (), ())),
        ([], 2, ((), ())),
        ([3, 2, 1], 1, ((0, 1, 2),)),
    ],
)
def test_items_are_divided_by_size(sizes: list[int], parts: int, expected: tuple[tuple[int, ...], ...]):
    assert balance(sizes, parts) == expected


def test_every_item_is_in_one_part_and_no_part_is_much_larger():
    sizes = [(7 * item) % 50 + 1 for item in range(100)]
    parts = balance(sizes, 4)
    loads = [sum(sizes[item] for item in part) for part in parts]
    assert sorted(item for part in parts for item in part) == list(range(100))
    assert max(loads) - min(loads) <= max(sizes)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, 0.01, fused=True),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
}


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.05}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_few_weights_are_updated_by_one_replica_with_the_bits_of_slices(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
):
    trained: list[list[Tensor]] = []
    threads: list[set[int]] = []
    for few in (0, 10**6):
        monkeypatch.setattr("lockstep.mirroring.optim.update._FEW", few)
        net = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 3))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for weights in net.parameters():
                nn.init.normal_(weights)
        with make_strategy(3).scope():
            model = ls.Model(net)
        model.compile(OPTIMIZERS[name], nn.CrossEntropyLoss(), **settings)
        history = model.fit([(x.float(), y) for x, y in oracle.vectors()], epochs=3, verbose=0)
        trained.append([*(weights.detach() for weights in net.parameters()), torch.tensor(history.history["loss"])])
        times = model.optimizer.times
        threads.append({len({moments.updated_s for moments in times if moments is not None})})
    assert all(map(torch.equal, *trained))
    assert threads == [{3}, {1}]  # as many replicas updated some weights
