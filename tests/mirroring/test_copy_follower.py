"""What is set on a module after it was mirrored: the numbers are those of the plain module with the same set on it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.mirrored import MirroredStrategy

STEPS = 4


@dataclass(slots=True)
class Inner:
    factor: float = 1.0


@dataclass
class Config:
    inner: Inner = field(default_factory=Inner)
    scale: float = 1.0
    powers: list[int] = field(default_factory=lambda: [1])


class Block(nn.Module):
    """A layer that does with its input what its attributes say."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = config
        self.factors = {"in": 1.0}
        self.last = deque([1.0], maxlen=3)
        self.skipped: set[str] = set()
        self.offset = torch.zeros(4)
        self.gate = 1.0
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x * self.factors["in"]) * self.gate * self.last[-1] + self.offset
        y = y * self.mask
        for power in self.config.powers:
            y = y**power
        return x if "all" in self.skipped else y * self.config.scale * self.config.inner.factor


class Net(nn.Module):
    """Two blocks with one config, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Config()
        self.blocks = nn.Sequential(Block(config), Block(config))
        self.head = nn.Linear(4, 3)
        self.alpha = 1.0
        self.weights = np.ones(3, dtype=np.float32)
        self.listed = [torch.ones(3)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x)) * self.alpha
        return y * torch.from_numpy(self.weights) * self.listed[0]


def an_attribute(net: Net) -> None:
    net.alpha = 0.5


def an_attribute_of_a_part(net: Net) -> None:
    net.blocks[1].gate = 0.25


def a_config_that_parts_share(net: Net) -> None:
    net.blocks[0].config.scale = 1.5


def a_list_in_a_config(net: Net) -> None:
    net.blocks[0].config.powers.append(2)


def another_config(net: Net) -> None:
    net.blocks[1].config = Config(scale=0.1)


def an_equal_config_that_changes_later(net: Net) -> None:
    net.blocks[1].config = Config()
    net.later = lambda: setattr(net.blocks[1].config, "scale", 7.0)


def an_object_with_slots(net: Net) -> None:
    net.blocks[1].config.inner.factor = 0.5


def a_dict(net: Net) -> None:
    net.blocks[0].factors["in"] = 2.0


def a_deque(net: Net) -> None:
    net.blocks[0].last.append(0.5)


def a_set(net: Net) -> None:
    net.blocks[0].skipped.add("all")


def a_plain_tensor(net: Net) -> None:
    net.blocks[0].offset = torch.ones(4)


def a_plain_tensor_in_place(net: Net) -> None:
    net.blocks[0].offset += 1.0


def a_plain_tensor_through_data(net: Net) -> None:
    net.blocks[0].offset.data[1] = 2.0  # type: ignore[union-attr]


def an_array_in_place(net: Net) -> None:
    net.weights[1] = 3.0


def another_array(net: Net) -> None:
    net.weights = np.zeros(3, dtype=np.float32)


def a_tensor_in_a_list(net: Net) -> None:
    net.listed[0].mul_(2.0)


def a_tensor_with_a_history(net: Net) -> None:
    net.blocks[0].offset = net.head.weight.sum(0) * 2  # type: ignore[assignment]
    net.blocks[0].offset = net.blocks[0].offset.detach()


def a_buffer_that_is_no_average(net: Net) -> None:
    net.blocks[1].mask[1:3] = False  # type: ignore[index, operator]


def another_buffer(net: Net) -> None:
    net.blocks[1].mask = torch.tensor([True, False, True, False])


def a_new_buffer(net: Net) -> None:
    net.head.register_buffer("shift", torch.ones(3))
    net.head.forward = MethodType(lambda self, x: nn.Linear.forward(self, x) + self.shift, net.head)  # type: ignore[method-assign]


def a_frozen_part(net: Net) -> None:
    net.blocks[0].requires_grad_(False)


def a_part_without_weights(net: Net) -> None:
    net.blocks[0] = nn.Tanh()


def a_part_left_out(net: Net) -> None:
    del net.blocks[1]


def parts_exchanged(net: Net) -> None:
    first, second = net.blocks[0], net.blocks[1]
    net.blocks[0], net.blocks[1] = second, first


def a_weight_tied(net: Net) -> None:
    net.blocks[1].linear.weight = net.blocks[0].linear.weight  # type: ignore[union-attr]


def values_of_weights(net: Net) -> None:
    with torch.no_grad():
        net.head.weight.mul_(0.5)


def other_storage_of_weights(net: Net) -> None:
    net.head.weight.data = torch.ones(3, 4)


def another_forward(net: Net) -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y

    net.forward = MethodType(forward, net)  # type: ignore[method-assign]


class Doubling(Net):
    """Its outputs are twice those of the class that it inherits from."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def another_class(net: Net) -> None:
    net.__class__ = Doubling


CHANGES: list[Callable[[Net], None]] = [
    *(an_attribute, an_attribute_of_a_part, a_config_that_parts_share, a_list_in_a_config, another_config),
    *(an_equal_config_that_changes_later, a_dict, a_deque, a_set, a_plain_tensor, a_plain_tensor_in_place),
    *(a_tensor_with_a_history, a_buffer_that_is_no_average, another_buffer, a_new_buffer, a_frozen_part),
    *(a_part_without_weights, a_part_left_out, parts_exchanged, a_weight_tied, values_of_weights),
    *(other_storage_of_weights, another_forward, another_class, a_plain_tensor_through_data),
    *(an_array_in_place, another_array, a_tensor_in_a_list, an_object_with_slots),
]


def rows(step: int) -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(step))


def apply_change(net: Net, change: Callable[[Net], None], step: int) -> None:
    """In the second step the change; in the third, once more, what it asks to be done later."""
    if step == 1:
        change(net)
    if step == 2 and "later" in net.__dict__:
        net.later()


def train_plain(change: Callable[[Net], None]) -> tuple[Net, list[Tensor]]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    losses = []
    for step in range(STEPS):
        apply_change(net, change, step)
        optimizer.zero_grad()
        loss = net(rows(step)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return net, losses


def train_mirrored(strategy: MirroredStrategy, change: Callable[[Net], None]) -> tuple[Net, list[Tensor]]:
    net = Net()
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.01, momentum=0.9))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = mirrored(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(STEPS)])):
        apply_change(net, change, number)
        losses.append(strategy.reduce("sum", strategy.run(step, (x,))))
    return net, losses


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_set_outside_gives_the_numbers_of_one_device(
    change: Callable[[Net], None], layout: str, make_strategy: MakeStrategy
):
    plain, expected = train_plain(change)
    net, losses = train_mirrored(make_strategy(3), change)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("inside", ["a new layer", "a replaced layer", "a new parameter"])
def test_a_grown_module_trains_as_on_one_device(inside: str, layout: str, make_strategy: MakeStrategy):
    def grow(net: Any, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(5)
        if inside == "a new layer":
            net.blocks.append(nn.Linear(4, 4))
            optimizer.add_param_group({"params": net.blocks[-1].parameters()})
        elif inside == "a replaced layer":
            net.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            optimizer.add_param_group({"params": net.head.parameters()})
            net.head[1].eval()
        else:
            net.blocks[0].offset = nn.Parameter(torch.ones(4))
            optimizer.add_param_group({"params": [net.blocks[0].offset]})

    plain = Net()
    own = torch.optim.SGD(plain.parameters(), 0.01, momentum=0.9)
    for number in range(1, STEPS):
        if number == 1:
            grow(plain, own)
        own.zero_grad()
        plain(rows(number)).square().sum().backward()
        own.step()

    strategy, net = make_strategy(3), Net()
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(net.parameters(), 0.01, momentum=0.9))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        mirrored(x).square().sum().backward()
        optimizer.step()

    for number, x in enumerate(strategy.distribute_dataset([rows(number) for number in range(1, STEPS)])):
        if number == 0:
            grow(mirrored, optimizer)
        strategy.run(step, (x,))

    torch.testing.assert_close(dict(mirrored.state_dict()), dict(plain.state_dict()))
    assert net.state_dict().keys() == plain.state_dict().keys()


def test_set_on_the_mirrored_object_is_set_on_the_module(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    mirrored = strategy.mirror(net)
    mirrored.alpha = 0.25
    mirrored.register_buffer("count", torch.zeros((), dtype=torch.int64))
    mirrored.extra = nn.Linear(2, 2)
    mirrored.training = False

    seen = strategy.local_results(strategy.run(lambda: (mirrored.alpha, mirrored.training, float(mirrored.count))))
    assert seen == ((0.25, False, 0.0),) * 3
    assert net.alpha == 0.25
    assert net.extra.weight is mirrored.extra.weight
    assert [name for name, _ in mirrored.named_parameters()][-2:] == ["extra.weight", "extra.bias"]
    del mirrored.extra
    assert not hasattr(net, "extra")
    strategy.run(lambda: None)
    assert not any(hasattr(duplicate, "extra") for duplicate in mirrored.copies)


def test_what_a_replica_sets_on_its_copy_is_its_own(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    net.counts = []
    mirrored = strategy.mirror(net)

    def step() -> None:
        context = here()
        mirrored.mine = context.local_replica
        mirrored.kept = mirrored.head.weight * context.local_replica
        mirrored.counts.append(context.local_replica)

    for _ in range(2):
        strategy.run(step)
        net.alpha += 1.0
    strategy.run(lambda: None)

    assert [duplicate.mine for duplicate in mirrored.copies] == [0, 1, 2]
    assert [duplicate.counts for duplicate in mirrored.copies] == [[0, 0], [1, 1], [2, 2]]
    assert [duplicate.alpha for duplicate in mirrored.copies] == [3.0] * 3
    assert torch.equal(mirrored.copies[2].kept, 2 * net.head.weight)
    net.counts.clear()
    strategy.run(lambda: None)
    assert [duplicate.counts for duplicate in mirrored.copies] == [[], [], []]


def test_a_step_that_failed_leaves_the_copies_to_themselves(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net())

    def fail() -> None:
        mirrored.mine = here().local_replica
        raise KeyError("meant")

    with pytest.raises(KeyError):
        strategy.run(fail)
    mirrored.alpha = 4.0
    strategy.run(lambda: None)
    assert [duplicate.alpha for duplicate in mirrored.copies] == [4.0, 4.0]


def test_what_cannot_be_copied_is_refused_by_its_name(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net())
    mirrored.blocks[0].lock = threading.Lock()
    with pytest.raises(UsageError, match=r"'lock', set on Block,"):
        strategy.run(lambda: None)
    del mirrored.blocks[0].lock
    strategy.run(lambda: None)


def test_a_mirrored_module_set_in_another_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    first, second = strategy.mirror(Net()), strategy.mirror(Net())
    first.head = second
    with pytest.raises(UsageError, match=r"'head', set on Net,.*mirrored module"):
        strategy.run(lambda: None)
    first.head = second.module.head
    strategy.run(lambda: None)
    assert [duplicate.head for duplicate in first.copies] == [duplicate.head for duplicate in second.copies]


def test_what_belongs_to_the_strategy_is_the_same_for_all(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    mirrored = strategy.mirror(Net())
    mirrored.strategy, mirrored.count = strategy, strategy.variable(1.0, aggregation="sum")
    mirrored.optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
    strategy.run(lambda: None)
    for name in ("strategy", "count", "optimizer"):
        assert len({id(getattr(duplicate, name)) for duplicate in mirrored.copies}) == 1


def test_a_parameter_made_in_a_step_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net())

    def step() -> None:
        mirrored.head.scale = nn.Parameter(torch.randn(3))

    with pytest.raises(UsageError, match=r"Net a new parameter, 'head\.scale'"):
        strategy.run(step)


def test_a_buffer_made_in_some_replicas_only_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net())

    def step() -> None:
        context = get_replica_context()
        if context is not None and context.local_replica == 0:
            mirrored.register_buffer("cache", torch.ones(1))

    with pytest.raises(UsageError, match="Net have 3, 2 buffers"):
        strategy.run(step)


def test_set_once_for_all_replicas_in_the_middle_of_a_run(make_strategy: MakeStrategy):
    strategy, net = make_strategy(3), Net()
    mirrored = strategy.mirror(net)

    def set_all(_: Any) -> None:
        net.alpha = 0.5
        net.blocks[0].config.scale = 2.0

    def step() -> tuple[float, float, int]:
        context = here()
        mirrored.mine = context.local_replica
        context.merge_call(set_all)
        return mirrored.alpha, mirrored.blocks[1].config.scale, mirrored.mine

    assert strategy.local_results(strategy.run(step)) == tuple((0.5, 2.0, replica) for replica in range(3))
    strategy.run(lambda: None)
    assert [duplicate.mine for duplicate in mirrored.copies] == [0, 1, 2]


def test_state_read_between_growth_and_the_next_run(make_strategy: MakeStrategy):
    mirrored = make_strategy(3).mirror(Net())
    mirrored.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    own = mirrored.module.state_dict()
    torch.testing.assert_close(dict(mirrored.state_dict()), dict(own))
    mirrored.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    for duplicate in mirrored.copies:
        assert not any(value.any() for value in duplicate.state_dict().values())
